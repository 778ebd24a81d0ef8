import assert from "node:assert/strict";
import { test } from "node:test";

import { findMarks, findPlaces, placePattern } from "./static/places.js";

const TEXTS = [
  ["main.cpp:3:15: error: expected ';'", [["main.cpp:3:15", 3, 15]]],
  ["/work/x/main.cpp:7: note", [["main.cpp:7", 7, null]]],
  ['  File "/s/main.cpp", line 12, in <module>', [['main.cpp", line 12', 12, null]]],
  [" --> main.cpp:2:1\n(main.cpp:4)", [["main.cpp:2:1", 2, 1], ["main.cpp:4", 4, null]]],
  ["domain.cpp:3:15 mainXcpp:3:1 main.cpp: main.cpp:x other.cpp:1:1", []],
  ["main.cpp:12345678", [["main.cpp:123456", 123456, null]]],
];

for (const [text, expected] of TEXTS) {
  test(JSON.stringify(text), () => {
    const places = findPlaces(text, placePattern(["main.cpp"]), 10);
    const found = places.map(({ start, end, line, column }) => [
      text.slice(start, end),
      line,
      column,
    ]);
    assert.deepEqual(found, expected);
  });
}

test("names are no patterns, and there is a bound of places", () => {
  assert.equal(findPlaces("a.b:1", placePattern([]), 10).length, 0);
  assert.equal(findPlaces("xy:1", placePattern(["x.*"]), 10).length, 0);
  assert.equal(findPlaces("f(1).py:1", placePattern(["f(1).py"]), 10).length, 1);
  assert.equal(findPlaces("a:1 ".repeat(1000), placePattern(["a"]), 100).length, 100);
});

test("marks have what compilers and interpreters say of a place", () => {
  const marks = (text) =>
    findMarks(text, placePattern(["a.py", "a.cpp"]), 2).map(({ name, line, column, message, severity }) =>
      [name, line, column, severity, message].join(" "),
    );
  assert.deepEqual(marks("a.cpp:3:5: error: no ';'\na.cpp:4: warning: b\na.cpp:5:1: note: c"), [
    "a.cpp 3 5 error error: no ';'",
    "a.cpp 4  warning warning: b",
  ]);
  assert.deepEqual(marks('  File "a.py", line 2\n    x =\n       ^\nSyntaxError: bad\n'), [
    "a.py 2  error SyntaxError: bad",
  ]);
  assert.deepEqual(marks("b.cpp:3:5: error"), []);
  assert.equal(marks(`a.cpp:1: ${"x".repeat(1000)}`)[0].length, 300 + "a.cpp 1  error ".length);
});
