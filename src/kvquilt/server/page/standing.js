/** Store and hit rate, of the one who asks. */

import { at, bytes, count, make, percent, several, table } from "./make.js";
import { bar, legend } from "./strip.js";

const HIT = ["exact", "reused", "corrected"];
const SOURCES = { "-": "computed, not needed from the store", compiled: "compiled in the request" };

export function showStanding(state) {
  const total = Object.values(state.tokens).reduce((sum, each) => sum + each, 0);
  const hits = HIT.reduce((sum, kind) => sum + state.tokens[kind], 0);
  const rate = total
    ? `Token hit rate ${percent(hits / total)}: ${count(hits)} of ${several(total, "prompt token")} in `
      + `${several(state.answers, "answer")} were exact, reused or corrected.`
    : "Token hit rate: no answers yet.";
  const drawn = total ? [bar(state.tokens, rate), legend(state.tokens)] : [];
  const cell = (value, shown) => (value === null ? "not known" : shown(value));
  const tiers = Object.entries(state.store).map(([tier, held]) =>
    [tier, cell(held.segments, count), cell(held.bytes, bytes), count(state.sources[tier] ?? 0)]);
  const documents = Object.entries(state.documents).map(([name, number]) => [name, count(number)]);
  const tables = make("div", { className: "tables" },
    table("Compiled segments by tier", ["tier", "segments", "bytes", "hits"], tiers),
    table("Uploaded documents", ["state", "documents"], documents));
  const others = Object.entries(state.sources).filter(([source]) => !(source in state.store)).map(([source, number]) =>
    make("p", { className: "note" }, `${several(number, "document")} ${SOURCES[source] ?? source}.`));
  at("standing-told").replaceChildren(make("p", { className: "rate" }, rate), ...drawn, tables, ...others);
}
