/** Files and pasted texts on their way to the server. */

import { json } from "./api.js";
import { at } from "./make.js";

const NAMES = /\.(txt|md)$/i;

/** Wire the ways in; `taken` gets the entry of each document, `said` what to tell. */
export function wireUploads(taken, said) {
  const drop = at("drop"), files = at("files"), paste = at("paste");
  // a file that is dropped beside the field must not replace the page
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
  drop.addEventListener("dragover", () => drop.classList.add("over"));
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => several([...event.dataTransfer.files], taken, said));
  files.addEventListener("change", async () => {
    await several([...files.files], taken, said);
    files.value = ""; // the same file may be chosen again
  });
  paste.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [id, title, text] = ["paste-id", "paste-title", "paste-text"].map((name) => at(name).value);
    said("", true);
    const sent = { text, ...(id && { id }), ...(title && { title }) };
    if (await one(id || "the text", sent, taken, said)) paste.reset();
  });
}

/** One after the other; those that are refused are told together. */
async function several(files, taken, said) {
  const refused = [];
  said("", true);
  for (const [n, file] of files.entries()) {
    said(`Uploading ${n + 1} of ${files.length}: ${file.name}`);
    const say = (told) => refused.push(told);
    if (!NAMES.test(file.name)) say(`${file.name}: only .txt and .md files are taken.`);
    else {
      const text = await readText(file);
      if (text === null) say(`${file.name}: cannot be read as UTF-8.`);
      else await one(file.name, { id: file.name, text }, taken, say);
    }
  }
  said("");
  said(refused.join(" "), true);
}

async function one(name, sent, taken, said) {
  try {
    taken(await json("/v1/documents", { method: "POST", body: sent }));
    return true;
  } catch (error) {
    said(`${name}: ${error.message}`, true);
    return false;
  }
}

async function readText(file) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    return null;
  }
}
