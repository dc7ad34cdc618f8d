/** Uploaded documents: their state while they compile, and which of them stand in the prompt. */

import { json, send } from "./api.js";
import { Chosen } from "./chosen.js";
import { at, make, several } from "./make.js";
import { wireUploads } from "./uploads.js";

const SOON = 500, LATER = 4000; // milliseconds to the next look: while something compiles, after a failure
const FEW = 12; // documents that are there already and so few are in the prompt from the start
const PAGE = 1000;

/** For all tenants, and nobody's here to delete. */
const isPublic = (id) => id.startsWith("public/");

export class Library {
  #rows = new Map();
  #entries = new Map();
  #timer = 0;
  #looks = 0;
  #changed;

  /** `changed` is called when documents are ready or gone. */
  constructor(changed) {
    this.#changed = changed;
    this.chosen = new Chosen((id) => this.named(id), () => this.#tick());
    wireUploads((entry) => this.#taken(entry), (text, bad) => this.#say(text, bad));
  }

  /** A document's title and id, or what there is of both. */
  named(id) {
    const title = this.#entries.get(id)?.title;
    return title ? `${title} (${id})` : id;
  }

  async begin() {
    await this.look();
    if (this.#entries.size > FEW) return;
    for (const { id, state } of this.#entries.values()) if (state !== "failed" && !isPublic(id)) this.chosen.add(id);
  }

  /** Forget what is shown: another key sees other documents. */
  clear() {
    clearTimeout(this.#timer);
    this.#looks++;
    for (const id of [...this.#entries.keys()]) this.#forget(id);
  }

  /** Ask for all documents, and again soon while any is on its way. */
  async look() {
    clearTimeout(this.#timer);
    const mine = ++this.#looks;
    let pause = 0;
    try {
      const entries = [...await all(""), ...await all("&public=true")];
      if (mine !== this.#looks) return; // asked again meanwhile: this may be older than what is shown
      const there = new Set(entries.map((entry) => entry.id));
      for (const id of [...this.#entries.keys()]) if (!there.has(id)) this.#forget(id);
      for (const entry of entries) this.#show(entry);
      if (entries.some((entry) => entry.state === "queued" || entry.state === "compiling"))
        pause = Math.max(SOON, entries.length); // a long list is not asked for all the time
    } catch (error) {
      if (mine !== this.#looks || error.isLocked) return;
      this.#say(error.message, true);
      pause = LATER;
    }
    if (pause) this.#timer = setTimeout(() => this.look(), pause);
  }

  #taken(entry) {
    this.#show(entry);
    this.chosen.add(entry.id);
    this.look();
  }

  #show(entry) {
    const before = this.#entries.get(entry.id);
    this.#entries.set(entry.id, entry);
    if (!this.#rows.has(entry.id)) this.#rows.set(entry.id, this.#row(entry));
    this.#fill(this.#rows.get(entry.id), entry);
    if (before?.title !== entry.title) this.chosen.draw();
    if (entry.state === "failed") this.chosen.remove(entry.id); // no prompt can have it
    if (before && before.state !== entry.state && (entry.state === "ready" || entry.state === "failed")) {
      this.#say(`${entry.id}: ${entry.state}${entry.error ? `, ${entry.error}` : ""}`, entry.state === "failed");
      this.#changed();
    }
  }

  #row({ id }) {
    const ticked = () => (tick.checked ? this.chosen.add(id) : this.chosen.remove(id));
    const tick = make("input", { type: "checkbox", onchange: ticked });
    const name = make("span", { className: "name" }), state = make("span", { className: "state" });
    const progress = make("progress", { hidden: true, "aria-label": `Compiling ${id}` });
    const remove = make("button", { type: "button", className: "small", hidden: isPublic(id) });
    const calm = () => {
      remove.dataset.sure = "";
      remove.textContent = "Delete";
      remove.setAttribute("aria-label", `Delete ${id}`);
    };
    calm();
    remove.addEventListener("blur", calm);
    remove.addEventListener("click", () => {
      if (remove.dataset.sure) return this.#delete(id);
      remove.dataset.sure = "yes"; // gone is gone: asked once more
      remove.textContent = "Really delete?";
      remove.setAttribute("aria-label", `Really delete ${id}?`);
    });
    const item = make("li", {}, make("label", {}, tick, name), state, progress, remove);
    at("library").append(item);
    return { item, tick, name, state, progress, remove };
  }

  #fill(row, entry) {
    row.name.textContent = this.named(entry.id);
    row.tick.disabled = entry.state === "failed";
    const told = `${entry.state}${entry.error ? `: ${entry.error}` : ""}, ${several(entry.characters, "character")}`;
    if (row.state.textContent !== told) row.state.textContent = told;
    row.state.className = `state ${entry.state}`;
    row.progress.hidden = entry.state !== "queued" && entry.state !== "compiling";
    // a portion of documents goes together: how many of it are done
    if (entry.progress) [row.progress.max, row.progress.value] = [entry.progress.total, entry.progress.done];
    else row.progress.removeAttribute("value");
  }

  async #delete(id) {
    try {
      await send(`/v1/documents/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      return this.#say(`${id}: ${error.message}`, true);
    }
    const item = this.#rows.get(id).item, next = item.nextElementSibling ?? item.previousElementSibling;
    (next?.querySelector("button:not([hidden])") ?? at("files")).focus();
    this.#forget(id);
    this.#say(`${id}: deleted`);
    this.look();
    this.#changed();
  }

  #forget(id) {
    this.#rows.get(id)?.item.remove();
    this.#rows.delete(id);
    this.#entries.delete(id);
    this.chosen.remove(id);
  }

  #tick() {
    for (const [id, row] of this.#rows) row.tick.checked = this.chosen.has(id);
  }

  #say(text, bad = false) {
    // what went well must not hide what did not
    at(bad ? "documents-trouble" : "documents-said").textContent = text;
  }
}

/** All documents that are listed with these parameters. */
async function all(which) {
  const entries = [];
  for (let more = true, after = ""; more; ) {
    const found = await json(`/v1/documents?limit=${PAGE}${which}${after}`);
    entries.push(...found.data);
    more = found.has_more;
    if (more) after = `&after=${encodeURIComponent(entries.at(-1).id)}`;
  }
  return entries;
}
