/**
 * The language of the page: its messages, numbers and times. A message is named by its English
 * text; the tables in `web/messages`, a file for each language, have the others, and the forms of
 * all that count something. What the daemon and evaluators say stays as it is.
 */

import { memory } from "./memory.js";
import { TABLES } from "./messages.js";

const TRANSLATED = ["aria-label", "data-empty", "placeholder", "title"];

const isSpoken = (tag) => Object.hasOwn(TABLES, baseOf(tag));
const preferred = (globalThis.navigator?.languages ?? []).filter(isSpoken);
const chosen = [memory.get("language"), ...preferred].find((tag) => tag && isSpoken(tag));

/** All languages that there are, and the one of this reader, such as "it". */
export const languages = Object.keys(TABLES);
export const language = baseOf(chosen ?? "en");

const locale = preferred.find((tag) => baseOf(tag) === language) ?? language; // such as "it-CH"
const plurals = new Intl.PluralRules(locale);
const ages = new Intl.RelativeTimeFormat(locale);

function baseOf(tag) {
  return String(tag).split("-")[0].toLowerCase();
}

/**
 * Return the message that is called `english`, with `values` in the place of their names in braces;
 * the number `n` decides its form. A text that is no message, such as a daemon's, stays as it is.
 */
export function say(english, values = {}) {
  const found = Object.hasOwn(TABLES[language], english) ? TABLES[language][english] : english;
  const text = typeof found === "string" ? found : (found[plurals.select(values.n)] ?? found.other);
  return text.replace(/\{(\w+)\}/g, (all, name) => {
    const value = values[name] ?? all;
    return typeof value === "number" ? formatNumber(value) : value;
  });
}

/** Return a number as it is written here, with so many `digits` after the point, or up to four. */
export function formatNumber(number, digits) {
  const most = { maximumFractionDigits: digits ?? 4, minimumFractionDigits: digits };
  return new Intl.NumberFormat(locale, most).format(number);
}

/** Return a time, a Date or what makes one, in this place's zone. */
export function formatTime(time, options) {
  return new Date(time).toLocaleString(locale, options);
}

/** Return that something was so many units ago, such as `formatAge(2, "hour")`. */
export function formatAge(count, unit) {
  return ages.format(-count, unit);
}

/** Return how a language calls itself. */
export function nameLanguage(tag) {
  return new Intl.DisplayNames(tag, { type: "language" }).of(tag);
}

/** Put the document, which is in English, into the language of the reader. */
export function translateDocument() {
  document.documentElement.lang = language;
  if (language === "en") return;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    node.data = node.data.replace(/\S.*\S|\S/s, (text) => say(text));
  }
  for (const name of TRANSLATED) {
    for (const found of document.querySelectorAll(`[${name}]`)) {
      found.setAttribute(name, say(found.getAttribute(name)));
    }
  }
}
