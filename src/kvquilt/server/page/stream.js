/** Answers as they come. */

import { RefusedError, send } from "./api.js";

/** The chunks of one streamed response, until its mark of the end. */
async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
}

/**
 * Ask; `piece` gets every piece of text. Returns the account, and the seconds to the first piece by the browser's
 * clock. Throws a RefusedError, also where the stream ends with one or breaks off.
 */
export async function answer(body, signal, piece) {
  const began = performance.now();
  let first = null;
  const response = await send("/v1/chat/completions", { method: "POST", body: { ...body, stream: true }, signal });
  for await (const chunk of chunks(response)) {
    if (chunk.error) throw new RefusedError(500, chunk.error.code, chunk.error.message);
    const [choice] = chunk.choices;
    const text = choice?.delta?.content;
    if (text) {
      first ??= (performance.now() - began) / 1000;
      piece(text);
    }
    if (chunk.kvquilt) return { account: chunk.kvquilt, reason: choice.finish_reason, first };
  }
  throw new RefusedError(0, "broken_off", "The answer broke off.");
}
