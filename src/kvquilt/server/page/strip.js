/** The prompt as a strip of blocks, one for each run, as wide as it has tokens. */

import { count, make, percent, several, table } from "./make.js";

export const KINDS = {
  exact: "as full prefill computes it, from the store",
  reused: "from the store, moved to its place",
  corrected: "from the store, moved and corrected",
  recomputed: "of a document, computed again",
  absent: "of a document, dropped from attention",
  inline: "text beside documents, computed",
};

/** A figure with strip, legend and table of an account's runs; `named` gives a document's name. */
export function strip(account, named) {
  const runs = account.runs.map((run, n) => ({ ...run, name: nameOf(run, n, account.runs.length, named) }));
  const total = runs.reduce((sum, run) => sum + run.tokens, 0);
  const uses = new Map(account.documents.map((use) => [use.id, use]));
  const kinds = Object.keys(KINDS).filter((kind) => account.tokens[kind]);
  const summary = kinds.map((kind) => `${kind} ${count(account.tokens[kind])}`).join(", ");
  const extent = `Prompt of ${several(total, "token")} in ${several(runs.length, "part")}`;
  const label = `${extent}: ${summary}. The table has every part.`;
  const drawn = make("div", { className: "strip", role: "img", "aria-label": label });
  drawn.append(...runs.map((run, n) => block(run, n + 1)));
  const rows = runs.map((run, n) => {
    const use = uses.get(run.document);
    const shares = pieces(run).map(([kind, tokens]) => `${kind} ${count(tokens)}`).join(", ");
    return [`${n + 1}`, run.name, count(run.tokens), shares, use?.source ?? "-", use?.why ?? KINDS[run.kept]];
  });
  const parts = table("Parts of the prompt", ["", "part", "tokens", "provenance", "from", "why"], rows);
  return make("figure", {}, make("figcaption", {}, extent), drawn, legend(account.tokens),
    make("details", {}, make("summary", {}, "Parts of the prompt as a table"), parts));
}

/** What the colours and patterns mean, with the tokens of each. */
export function legend(tokens) {
  const total = Object.values(tokens).reduce((sum, each) => sum + each, 0);
  const items = Object.keys(KINDS).filter((kind) => tokens[kind]).map((kind) =>
    make("li", { title: KINDS[kind] }, make("span", { className: `swatch ${kind}`, "aria-hidden": "true" }),
      `${kind} ${count(tokens[kind])} (${percent(tokens[kind] / total)})`));
  return make("ul", { className: "legend", "aria-label": "Tokens by provenance" }, ...items);
}

/** A bar of all kinds, for who needs no runs. */
export function bar(tokens, label) {
  const kinds = Object.keys(KINDS).filter((kind) => tokens[kind]);
  return make("div", { className: "strip", role: "img", "aria-label": label },
    ...kinds.map((kind) => wide(make("span", { className: kind }), tokens[kind])));
}

function nameOf(run, n, runs, named) {
  if (run.document !== null) return named(run.document);
  if (runs === 1) return "whole prompt";
  return n === 0 ? "opening" : n === runs - 1 ? "question" : "text between";
}

const pieces = (run) =>
  [[run.kept, run.tokens - run.recomputed], ["recomputed", run.recomputed]].filter(([, tokens]) => tokens > 0);

function block(run, number) {
  const shares = pieces(run).map(([kind, tokens]) => `${kind} ${count(tokens)}`).join(", ");
  const parts = pieces(run).map(([kind, tokens]) => wide(make("span", { className: kind }), tokens));
  const title = `${number}. ${run.name}: ${shares}`, label = make("b", { className: "number" }, `${number}`);
  return wide(make("div", { className: "run", title }, ...parts, label), run.tokens);
}

function wide(element, tokens) {
  element.style.flexGrow = tokens;
  return element;
}
