/** Questions and their answers; with the switch each is also answered by full prefill beside. */

import { at, make, several } from "./make.js";
import { answer } from "./stream.js";
import { strip } from "./strip.js";
import { times } from "./times.js";
import { compared } from "./words.js";

export class Asking {
  #turns = []; // questions that were answered, with the answers
  #library;
  #state;
  #stopping = null;
  #look;

  /** `look` asks for the state anew and returns it. */
  constructor(library, look) {
    this.#library = library;
    this.#look = look;
    const question = at("question");
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(question.value.trim());
    });
    question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      at("ask").requestSubmit();
    });
    at("stop").addEventListener("click", () => this.#stopping?.abort());
    at("anew").addEventListener("click", () => this.anew());
    at("method").addEventListener("change", () => this.#tell());
  }

  /** What the server has to offer, as of now. */
  set state(state) {
    const list = at("method"), names = state.methods.map((each) => each.name);
    if ([...list.options].map((option) => option.value).join() !== names.join()) {
      list.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
      if (!names.includes(state.method)) list.prepend(make("option", { value: state.method }, state.method));
      list.value = state.method;
    }
    this.#state = state;
    this.#tell();
  }

  /** Stop, and begin without history. */
  anew() {
    this.#stopping?.abort();
    this.#turns = [];
    at("turns").replaceChildren();
    at("ask-said").textContent = "";
    at("question").focus();
  }

  #tell() {
    const chosen = this.#state.methods.find((each) => each.name === at("method").value);
    at("method-told").textContent = chosen ? `${chosen.name}: ${chosen.summary}.` : "As the server was told.";
  }

  async #ask(question) {
    if (this.#stopping) return;
    at("ask-said").textContent = question ? "" : "Write a question first.";
    if (!question) return at("question").focus();
    const turns = this.#turns, body = { messages: this.#messages(question), temperature: 0, ...this.#length() };
    const compare = at("compare").checked, methods = [at("method").value, ...(compare ? ["full"] : [])];
    const sides = methods.map((method) => new Side(method, compare && method === "full" ? "full prefill" : method));
    at("turns").append(make("article", { className: "turn" }, make("h3", { dir: "auto" }, question),
      make("div", { className: "sides" }, ...sides.map((side) => side.element))));
    this.#busy(true);
    try {
      // one after the other: together each would slow the other down, and neither time would mean anything
      for (const side of sides) await side.run(body, this.#stopping.signal);
      at("question").value = "";
    } catch (error) {
      at("ask-said").textContent = error.name === "AbortError" ? "" : error.message;
    }
    if (turns === this.#turns && sides[0].text) turns.push({ question, answer: sides[0].text });
    this.#busy(false);
    await this.#look();
    const beside = sides[1]?.found?.account;
    const known = this.#state.full_prefill, named = (id) => this.#library.named(id);
    for (const side of sides) side.account(known, side === sides[0] ? beside : undefined, named);
    if (beside) contrast(...sides);
  }

  #busy(is) {
    this.#stopping = is ? new AbortController() : null;
    const [from, to] = is ? [at("go"), at("stop")] : [at("stop"), at("question")];
    const held = document.activeElement === from; // a button that is disabled drops the focus
    at("go").disabled = is;
    at("stop").disabled = !is;
    at("turns").setAttribute("aria-busy", is);
    if (held) to.focus();
  }

  #length() {
    const length = at("length").valueAsNumber;
    return Number.isNaN(length) ? {} : { max_tokens: length };
  }

  /** As the engine writes its own prompts, so that the first document is exact; then the turns so far. */
  #messages(question) {
    const { text, role } = this.#state.system, documents = this.#library.chosen.ids;
    const content = [...documents.map((id) => ({ type: "document", id }))];
    if (text && !role) content.unshift({ type: "text", text: `${text}\n\n` });
    const messages = text && role ? [{ role: "system", content: text }] : [];
    [...this.#turns, { question }].forEach((turn, n) => {
      const lead = documents.length && n === 0 ? "\nQuestion: " : "";
      const asked = { type: "text", text: lead + turn.question };
      messages.push({ role: "user", content: n === 0 ? [...content, asked] : [asked] });
      if (turn.answer) messages.push({ role: "assistant", content: turn.answer });
    });
    return messages;
  }
}

/** One answer of a turn. */
class Side {
  text = "";
  found = null;

  constructor(method, name) {
    this.method = method;
    this.said = make("p", { className: "answer", dir: "auto" });
    this.status = make("p", { className: "note" }, "not begun");
    this.element = make("section", { className: "side", "aria-label": `Answer by ${name}` },
      make("h4", {}, name), this.said, this.status);
  }

  async run(body, signal) {
    this.status.textContent = "waiting for the first token";
    try {
      this.found = await answer({ ...body, kvquilt: { method: this.method } }, signal, (piece) => {
        this.text += piece;
        this.said.append(piece);
        this.status.textContent = "answering";
      });
      this.status.textContent = this.found.reason === "length" ? "Cut off at its longest." : "";
    } catch (error) {
      this.status.textContent = error.name === "AbortError" ? "Stopped." : "Failed.";
      throw error;
    }
  }

  /** What it reused and how long it took, once it has ended. */
  account(known, beside, named) {
    if (!this.found) {
      if (this.status.textContent === "not begun") this.status.textContent = "Not asked.";
      return;
    }
    const { account } = this.found;
    const notes = account.fallbacks.map((each) => each.detail);
    if (account.gate) notes.unshift(`Gate: ${account.gate}.`);
    if (account.method !== account.asked) notes.unshift(`${account.asked} ran ${account.method}.`);
    this.element.append(strip(account, named), ...times(this.found, known, beside),
      ...notes.map((note) => make("p", { className: "note" }, note)));
  }

  mark(words) {
    const parts = words.flatMap(([word, same]) => {
      const text = word.trimStart(), gap = word.slice(0, word.length - text.length);
      return [gap, same ? text : make("mark", {}, text)];
    });
    this.said.replaceChildren(...parts);
  }
}

/** Mark what differs. */
function contrast(left, right) {
  const { left: ours, right: theirs, shared } = compared(left.text, right.text);
  left.mark(ours);
  right.mark(theirs);
  const all = Math.max(ours.length, theirs.length);
  const told = left.text === right.text ? "Both answers are the same, word for word."
    : `Of ${several(all, "word")} ${shared} stand in both answers, in the same order; the others are marked.`;
  left.element.parentElement.after(make("p", { className: "contrast" }, told));
}
