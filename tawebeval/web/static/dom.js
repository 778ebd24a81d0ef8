/** Elements, made and found. Text is always text: nothing here reads markup. */

import { formatNumber, formatTime, say } from "./language.js";

const TIME = /\d{4}-\d\d-\d\dT\d\d:\d\d:[\d.]+(?:Z|[+-]\d\d:\d\d)/g;

/** Return the element of the page with this identifier. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Return a new element. A property that elements do not have becomes an attribute; children
 * are elements or text.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Let a select offer options, pairs of value and text; keep its value, or begin with `first`. */
export function setOptions(select, options, first = "") {
  const wanted = select.length > 0 ? select.value : first;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = wanted;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

/**
 * Let a button rest, or no longer, while it is at work. It keeps the focus, which `disabled`
 * would take from it; who presses it has to ask `isBusy`.
 */
export function setBusy(button, busy) {
  button.ariaDisabled = busy ? "true" : null;
}

/** Return whether a button rests. */
export function isBusy(button) {
  return button.ariaDisabled === "true";
}

/** Tell those who do not see the page; what is said next replaces it, so say little. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** Put a text on the clipboard, and say so on the button for a moment. */
export async function copy(button, text) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  let said = say("Copied");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = say("Not allowed"); // browsers allow it only over TLS, or to this machine's own pages
  }
  button.textContent = said;
  announce(said);
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

/** Return what is to be said of an error of a request, with times as they are here. */
export function said(error) {
  if (!error.status && !error.field) return say("The server does not answer.");
  return error.message.replace(TIME, (time) => shortTime(time));
}

/** Return the values of a message about the pause before a retry. */
export function pauseWords({ seconds, why }) {
  return { time: duration(seconds), why: say(why) };
}

/** Return a day and the minute. */
export function shortTime(time) {
  return formatTime(time, { dateStyle: "medium", timeStyle: "short" });
}

/** Return a length of time, in seconds, for people. */
export function duration(seconds) {
  // It may be an ExactNumber.
  if (seconds < 10) return say("{count} s", { count: formatNumber(Number(seconds), 1) });
  if (seconds < 60) return say("{count} s", { count: Math.floor(seconds) });
  const [minutes, hours] = [Math.floor(seconds / 60), Math.floor(seconds / 3600)];
  if (minutes < 60) return withRest("{count} min", minutes, "{count} s", Math.floor(seconds % 60));
  return withRest("{count} h", hours, "{count} min", minutes % 60);
}

function withRest(words, count, smaller, rest) {
  const first = say(words, { count });
  return rest === 0 ? first : `${first} ${say(smaller, { count: rest })}`;
}

/** Return a number of bytes for people. */
export function bytes(count) {
  if (count < 1024) return `${count} B`;
  if (count < 1024 ** 2) return `${formatNumber(count / 1024, 1)} KiB`;
  return `${formatNumber(count / 1024 ** 2, 1)} MiB`;
}
