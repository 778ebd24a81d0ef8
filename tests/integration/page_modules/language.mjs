import assert from "node:assert/strict";
import { test } from "node:test";

Object.defineProperty(globalThis, "navigator", { value: { languages: ["fr", "it-IT", "en"] } });
const { formatAge, formatNumber, language, nameLanguage, say } = await import("./static/language.js");

test("the first language that there is, is taken", () => {
  assert.equal(language, "it");
  assert.equal(nameLanguage(language), "italiano");
  assert.equal(formatNumber(1.25), "1,25");
  assert.equal(formatAge(2, "hour"), "2 ore fa");
});

test("messages have the form of their number, and their values", () => {
  assert.equal(say("Copy link"), "Copia il link");
  assert.equal(say("{n} evaluations", { n: 1 }), "1 valutazione");
  assert.equal(say("{n} evaluations", { n: 12000 }), "12.000 valutazioni");
  assert.equal(say("{score} of {maximum}", { score: "<b>", maximum: 3 }), "<b> su 3");
});

test("what is no message stays as it is", () => {
  for (const text of ["the daemon's {own} words", "constructor", ""]) assert.equal(say(text), text);
});
