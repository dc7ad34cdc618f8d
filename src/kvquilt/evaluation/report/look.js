"use strict";
const all = (within, what) => [...within.querySelectorAll(what)];
for (const run of all(document, "section.run")) {
  const controls = run.querySelector(".controls");
  if (!controls) continue;
  const only = controls.querySelector(".only"), colour = controls.querySelector(".colour");
  const items = all(run, ".item");
  const filter = () => {
    const [what, arm] = only.value.split(":");
    for (const item of items) {
      const right = item.dataset.right.split(","), full = right.includes("0"), here = right.includes(arm);
      item.hidden = what === "lost" ? !full || here : what === "gained" ? full || !here : false;
    }
    controls.querySelector(".count").textContent = items.filter((item) => !item.hidden).length + " items.";
  };
  const paint = () => {
    for (const each of all(run, ".document")) {
      const kind = each.dataset.kinds.split(",")[colour.value];
      each.className = "document" + (kind ? " shows-" + kind : "");
    }
  };
  only.addEventListener("change", filter);
  colour.addEventListener("change", paint);
  colour.value = String(Math.max(0, [...colour.options].findIndex((option) => option.text === "none")));
  controls.hidden = false;
  filter();
  paint();
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input, textarea")) return;
  const step = { j: 1, k: -1 }[event.key];
  if (!step) return;
  const heads = all(document, ".item:not([hidden]) > summary");
  const at = heads.findIndex((head) => head.parentElement.contains(document.activeElement));
  const next = heads[at < 0 ? (step > 0 ? 0 : heads.length - 1) : at + step];
  if (next) next.focus();
});
