/** Documents in the prompt, in an order that buttons change. */

import { at, make } from "./make.js";

export class Chosen {
  #ids = [];
  #named;
  #changed;

  constructor(named, changed) {
    this.#named = named;
    this.#changed = changed;
    this.draw();
  }

  get ids() {
    return [...this.#ids];
  }

  has(id) {
    return this.#ids.includes(id);
  }

  add(id) {
    if (!this.has(id)) this.#ids.push(id);
    this.#settle();
  }

  remove(id) {
    this.#ids = this.#ids.filter((each) => each !== id);
    this.#settle();
  }

  draw() {
    const items = this.#ids.map((id, n) => make("li", {}, make("span", { className: "name" }, this.#named(id)),
      this.#button(id, "Up", n - 1, "up"), this.#button(id, "Down", n + 1, "down")));
    at("chosen").replaceChildren(...items);
    at("chosen-none").hidden = items.length > 0;
  }

  #button(id, text, to, way) {
    const disabled = to < 0 || to >= this.#ids.length;
    return make("button", { type: "button", className: `small ${way}`, disabled, "aria-label": `Move ${id} ${way}`,
      onclick: () => this.#move(id, to, way) }, text);
  }

  #move(id, to, way) {
    this.#ids = this.#ids.filter((each) => each !== id);
    this.#ids.splice(to, 0, id);
    this.#settle();
    const item = at("chosen").children[to];
    // at the end of the list only the other way is left
    (item.querySelector(`.${way}:enabled`) ?? item.querySelector("button:enabled")).focus();
    at("documents-said").textContent = `${id} is now ${to + 1} of ${this.#ids.length}`;
  }

  #settle() {
    this.draw();
    this.#changed();
  }
}
