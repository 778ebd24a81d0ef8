import assert from "node:assert/strict";
import { test } from "node:test";

import { StyledText } from "./static/ansi.js";

/** Return runs as text: `[style|text]`, or the text alone. */
function show(runs) {
  const joined = [];
  for (const { text, style } of runs) {
    if (joined.at(-1)?.style === style) joined.at(-1).text += text;
    else joined.push({ text, style });
  }
  return joined.map(({ text, style }) => (style ? `[${style}|${text}]` : text)).join("");
}

const CASES = [
  ["plain\ntext", "plain\ntext"],
  ["\x1b[31mred\x1b[0m no", "[fg-1|red] no"],
  ["\x1b[1;32mA\x1b[22mB\x1b[mC", "[bold fg-2|A][fg-2|B]C"],
  ["\x1b[97;104mA\x1b[39;49mB", "[fg-15 bg-12|A]B"],
  ["\x1b[38;5;196mA\x1b[38;5;7mB", "[fg-9|A][fg-7|B]"],
  ["\x1b[48;2;0;0;250mA\x1b[38;2;1mB", "[bg-12|A][fg-0 bg-12|B]"],
  ["\x1b[38:5:2mA", "[fg-2|A]"],
  ["\x1b[38;5mA\x1b[38;5;999mB\x1b[38mC", "ABC"],
  ["\x1b[4;7;9;3;2mA\x1b[24;27;29;23;22mB", "[underline inverse struck italic faint|A]B"],
  ["\x1b[99;109;1234;x1mA", "1mA"],
  ["a\x1b[2Jb\x1b[10;20Hc\x1b[?25ld\x1b(Be\x1b=f\x1b7g", "abcdefg"],
  ["a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x1bPq\x1b\\d", "abcd"],
  ["a\x1b]0;no end\nb", "a\nb"],
  ["a\x1b\x1b\x1b[31mb", "a[fg-1|b]"],
  ["<b>&amp;\u202e", "<b>&amp;\u202e"],
];

for (const [source, expected] of CASES) {
  test(`${JSON.stringify(source)}, whole and cut anywhere`, () => {
    assert.equal(show(new StyledText().take(source)), expected);
    for (let cut = 0; cut <= source.length; cut++) {
      const text = new StyledText();
      const runs = [...text.take(source.slice(0, cut)), ...text.take(source.slice(cut))];
      assert.equal(show(runs), expected, `cut at ${cut}`);
    }
    const text = new StyledText();
    assert.equal(show([...source].flatMap((character) => text.take(character))), expected);
  });
}

test("a sequence without an end is not kept for ever", () => {
  const text = new StyledText();
  let shown = "";
  for (let n = 0; n < 200; n++) shown += show(text.take(n ? "0123456789" : "\x1b]"));
  assert.ok(text.rest.length < 1100);
  assert.ok(shown.length > 900);
});
