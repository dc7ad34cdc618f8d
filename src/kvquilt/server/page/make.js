/** An element with properties and children. Strings become text, never markup, whatever is in them. */
export function make(name, given = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("aria-") || key === "role" || key === "for" || key === "scope") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

/** The one element of the page with this id. */
export const at = (id) => document.getElementById(id);

export const count = (number) => new Intl.NumberFormat("en").format(number);

/** `1 document`, `2 documents`. */
export const several = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.095 ? 1 : 0)} %`;

export const seconds = (value) => (value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);

export function bytes(value) {
  const unit = value < 1e6 ? [1e3, "kB"] : value < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return `${(value / unit[0]).toFixed(1)} ${unit[1]}`;
}

/** A table that scrolls alone; `rows` are lists of cells, the first of each a head of its row. */
export function table(caption, head, rows) {
  const cells = ([first, ...others]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...others.map((cell) => make("td", {}, cell)));
  const heads = head.map((cell) => make("th", { scope: "col" }, cell));
  const made = make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows.map(cells)));
  // what scrolls must be reached by the keyboard
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, made);
}
