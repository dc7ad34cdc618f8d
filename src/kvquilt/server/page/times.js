/** Time to the first token against full prefill: measured beside it, or estimated, or not known. */

import { make, percent, seconds, several } from "./make.js";

/**
 * Lines and bars of one answer.
 * `known` is the server's measurement of full prefills; `beside` the account of one of the very same question.
 */
export function times({ account, first }, known, beside) {
  const own = account.seconds.first_token, { value, told } = whole(account, known, beside);
  const widest = Math.max(own, value ?? 0);
  const bars = [bar("this answer", own, widest)];
  if (value !== null) bars.push(bar(beside ? "full prefill" : "full prefill, estimated", value, widest));
  const clocks = `First token after ${seconds(own)} by the server's clock`
    + (first === null ? "." : `, ${seconds(first)} by the browser's, waiting and transport included.`);
  const share = account.flops_full ? percent(account.flops / account.flops_full) : "";
  const work = share ? ` Estimated work: ${share} of a full prefill's.` : "";
  return [
    make("div", { className: "bars", "aria-hidden": "true" }, ...bars),
    make("p", { className: "times" }, clocks + (value === null ? "" : ratio(value, own))),
    make("p", { className: "note" }, told + (isFull(account) ? "" : work)),
  ];
}

const isFull = (account) => account.method.split(":")[0] === "full";

const ratio = (full, own) => full >= own
  ? ` That is ${(full / own).toFixed(1)} times sooner than full prefill.`
  : ` That is ${(own / full).toFixed(1)} times later than full prefill.`;

/** Seconds of full prefill for this prompt, or null, and how they are known. */
function whole(account, known, beside) {
  if (isFull(account)) return { value: null, told: "This answer was a full prefill." };
  if (beside) {
    const told = "Full prefill was measured beside it, by the server's clock.";
    return { value: beside.seconds.first_token, told };
  }
  if (known.seconds_per_flop === null) {
    const told = "How long full prefill takes here is not known: none of your prompts was read in full since the "
      + "server began. The switch measures it.";
    return { value: null, told };
  }
  const told = "Full prefill is estimated from its operations and the speed of your last "
    + `${several(known.measured, "full prefill")} on this server.`;
  return { value: account.flops_full * known.seconds_per_flop, told };
}

function bar(label, value, widest) {
  const drawn = make("span", { className: "bar" });
  drawn.style.width = `${(100 * value) / widest}%`;
  return make("div", {}, make("span", { className: "what" }, `${label} ${seconds(value)}`), drawn);
}
