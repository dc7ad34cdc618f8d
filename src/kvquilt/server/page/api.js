/** Calls of the server, with the key where it asks for one. */

const PLACE = "kvquilt-key";
const kept = { key: sessionStorage.getItem(PLACE) ?? "", locked: () => {} };

/** What the server would not do, in its words; status 0: it was not reached. */
export class RefusedError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** Whether another key is needed. */
  get isLocked() {
    return this.status === 401 || this.code === "wrong_key";
  }
}

export const hasKey = () => kept.key !== "";

/** "" forgets it. A key that no header can carry is refused here. */
export function setKey(key) {
  if (!/^[\x21-\x7e]*$/.test(key))
    throw new RefusedError(401, "invalid_api_key", "A key has no spaces and plain letters only.");
  kept.key = key;
  if (key) sessionStorage.setItem(PLACE, key);
  else sessionStorage.removeItem(PLACE);
}

/** Call `locked` with the refusal whenever a key is missing, wrong, or no longer taken. */
export function onLocked(locked) {
  kept.locked = locked;
}

/** The response, if it is a good one. */
export async function send(path, { method = "GET", body, signal } = {}) {
  const headers = kept.key ? { authorization: `Bearer ${kept.key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: sent, signal, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RefusedError(0, "unreachable", "The server cannot be reached.");
  }
  if (response.ok) return response;
  const refused = await inWords(response);
  if (refused.isLocked) kept.locked(refused);
  throw refused;
}

export const json = async (path, options) => (await send(path, options)).json();

async function inWords(response) {
  try {
    const { message, code } = (await response.json()).error;
    return new RefusedError(response.status, code, message);
  } catch {
    return new RefusedError(response.status, "unknown", `The server answered ${response.status}.`);
  }
}
