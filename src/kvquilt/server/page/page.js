/** The page: what stands where, and who is told when something changes. */

import { hasKey, json, onLocked, setKey } from "./api.js";
import { Asking } from "./asking.js";
import { Library } from "./library.js";
import { at } from "./make.js";
import { showStanding } from "./standing.js";

const SHOWN = ["documents", "talk", "standing"];

async function look() {
  try {
    const state = await json("/v1/kvquilt/state");
    asking.state = state;
    showStanding(state);
    at("served").textContent = `serves ${state.model}, ${state.max_model_len.toLocaleString("en")} tokens at most`;
    tell("");
    return true;
  } catch (error) {
    if (!error.isLocked) tell(error.message);
    return false;
  }
}

function tell(trouble) {
  at("trouble").textContent = trouble;
  at("trouble").hidden = !trouble;
}

function locked(refused) {
  tell(!hasKey() ? "" : refused.status === 401 ? "The server does not take this key." : refused.message);
  setKey("");
  if (!at("lock").hidden) return;
  for (const id of SHOWN) at(id).hidden = true;
  at("lock").hidden = false;
  at("forget").hidden = true;
  library.clear();
  asking.anew(); // what was told to one key is not left for the next
  at("key").focus();
}

async function begin() {
  if (!(await look())) return;
  at("lock").hidden = true;
  at("forget").hidden = !hasKey();
  for (const id of SHOWN) at(id).hidden = false;
  await library.begin();
}

const library = new Library(look);
const asking = new Asking(library, look);
onLocked(locked);
at("unlock").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    setKey(at("key").value.trim());
  } catch (error) {
    return tell(error.message);
  }
  at("key").value = "";
  await begin();
  if (at("lock").hidden) at("question").focus();
});
at("forget").addEventListener("click", () => {
  setKey("");
  locked(null);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && at("lock").hidden) library.look();
});
begin();
