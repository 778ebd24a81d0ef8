import assert from "node:assert/strict";
import { test } from "node:test";

import { assignFiles, findStudents, stem } from "./static/students.js";

/** Return the students in a few words: `ann: a.py b.py`. */
function students(paths, most = 1) {
  const files = paths.map((path) => ({
    path: path.replace(/\/$/, ""),
    content: path.endsWith("/") ? null : path,
  }));
  return findStudents(files, most).map(
    ({ name, files }) => `${name}: ${files.map((file) => file.name).join(" ")}`,
  );
}

for (const [why, paths, expected, most] of [
  ["nothing", [], []],
  ["files", ["bob.py", "ann.py"], ["ann: ann.py", "bob: bob.py"]],
  ["folders in a ZIP", ["hw/ann/a.py", "hw/bob/b.py"], ["ann: a.py", "bob: b.py"]],
  ["folders in a folder in a ZIP", ["hw/x/ann/a.py", "hw/x/bob/b.py"], ["ann: a.py", "bob: b.py"]],
  ["one folder with one file", ["ann/main.py"], ["ann: main.py"]],
  ["one folder in a ZIP", ["hw/ann/main.py"], ["ann: main.py"]],
  ["one folder with a file of each student", ["hw/ann.py", "hw/bob.py"], ["ann: ann.py", "bob: bob.py"]],
  ["as many files as fields", ["ann/a.py", "ann/b.py"], ["ann: a.py b.py"], 2],
  ["folders of several files", ["h/ann/a", "h/ann/b", "h/bob/c"], ["ann: a b", "bob: c"]],
  ["folders in a student's folder", ["h/ann/src/a", "h/bob/src/b"], ["ann: a", "bob: b"]],
  ["files beside folders", ["h/ann.py", "h/bob/b.py"], ["ann: ann.py", "bob: b.py"]],
  ["a ZIP of each student", ["ann/main.py", "bob/main.py"], ["ann: main.py", "bob: main.py"]],
  ["two ZIPs with the same student", ["hw/ann/a", "hw/x/a", "hw (2)/ann/b", "hw (2)/y/b"],
    ["hw (2)/ann: b", "hw/ann: a", "x: a", "y: b"]],
  ["a ZIP of a class in a folder, and one more", ["hw/x/ann/a", "hw/x/bob/b", "carl/c"],
    ["ann: a", "bob: b", "carl: c"]],
  ["a ZIP of each student with a folder", ["ann/src/a", "bob/src/b"], ["ann: a", "bob: b"]],
  ["folders deep in a student's folder", ["h/ann/x/y/a", "h/ann/x/z/b", "h/bob/c"],
    ["ann: a b", "bob: c"]],
  ["two files of one name", ["ann.py", "ann.cpp"], ["ann.cpp: ann.cpp", "ann.py: ann.py"]],
  ["folders of Moodle", ["hw/Ann Lee_12_assignsubmission_file_/a.py", "hw/Bob_3_assignsubmission_file_/b.py"],
    ["Ann Lee: a.py", "Bob: b.py"]],
  ["files of Moodle", ["Ann Lee_12_assignsubmission_file_a.py", "Bob_3_assignsubmission_file_b.py"],
    ["Ann Lee: a.py", "Bob: b.py"]],
  ["students of one name at Moodle", ["h/Ann_1_assignsubmission_file_/a", "h/Ann_2_assignsubmission_file_/b"],
    ["h/Ann (1): a", "h/Ann (2): b"]],
  ["an empty folder beside those of students", ["hw/bob/", "hw/ann/a.py"], ["ann: a.py", "bob: "]],
  ["an empty folder at the top", ["ann/a.py", "bob/"], ["ann: a.py", "bob: "]],
  ["an empty folder beside files of students", ["hw/a.py", "hw/b.py", "hw/c/"], ["a: a.py", "b: b.py", "c: "]],
  ["an empty folder of Moodle", ["hw/Bob_3_assignsubmission_file_/x/", "hw/Ann_2_assignsubmission_file_/a.py"],
    ["Ann: a.py", "Bob: "]],
  ["empty folders in a student's folder", ["h/ann/src/a", "h/ann/x/", "h/ann/y/", "h/bob/c"],
    ["ann: a", "bob: c"]],
  ["names that objects have", ["__proto__/a", "constructor/b"], ["__proto__: a", "constructor: b"]],
]) {
  test(why, () => assert.deepEqual(students(paths, most), expected));
}

function assign(names, fields, extensions) {
  const { pairs, wrong } = assignFiles(names.map((name) => ({ name })), fields, extensions);
  return wrong ?? pairs.map(({ field, file }) => `${field}=${file.name}`).join(" ");
}

test("files go to the fields of their names, and the last to the last", () => {
  assert.equal(assign(["main.py"], ["source"]), "source=main.py");
  assert.equal(assign(["main.py"], []), "source=main.py");
  assert.equal(assign(["b.txt", "a.py"], ["a", "b"]), "a=a.py b=b.txt");
  assert.equal(assign(["b.txt", "x.py"], ["a", "b"]), "b=b.txt a=x.py");
  assert.match(assign(["x.txt", "y.py"], ["a", "b"]), /no file is named a/);
  assert.match(assign(["x", "y"], ["source"]), /2 files, but the problem takes 1 \(source\)/);
  assert.equal(assign([], ["source"], ["py"]), "nothing handed in");
  assert.equal(assign(["main.PY"], ["source"], ["cpp", "py"]), "source=main.PY");
  assert.equal(assign(["a.txt"], ["source"], ["cpp", "py"]), "a.txt: the problem takes cpp, py");
});

test("a name loses its last extension alone", () => {
  assert.deepEqual(["a.tar.gz", ".x", "a", "a."].map(stem), ["a.tar", ".x", "a", "a"]);
});
