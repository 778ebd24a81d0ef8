/** From files in folders to students and the files that each submits. */

import { say } from "./language.js";

/**
 * Return the students of `files`, `[{ path, content }]`: `[{ name, files }]`, `files` as
 * `[{ name, content }]`. ZIP files count as folders; without `content` it is an empty folder, which
 * is a student where others are beside it. A submission has up to `most` files.
 *
 * A folder beside others is a student, and so is a file beside folders. Of a folder without
 * folders in it, up to `most` files are one student's, and more are one of each student. The names
 * of two students are never the same: the folders above are added. Of several folders at the top,
 * one with nothing but a folder in it is as that folder if there are several folders in that.
 */
export function findStudents(files, most) {
  const root = makeFolder("", "");
  const isEmpty = ({ content }) => Number(content === null);
  for (const { path, content } of [...files].sort((one, other) => isEmpty(one) - isEmpty(other))) {
    addFile(root, path.split("/"), content);
  }
  const students = [...walk(root, most)];
  const counts = new Map();
  for (const { name } of students) counts.set(name, (counts.get(name) ?? 0) + 1);
  const named = students.map(({ name, path, files }) => ({
    name: counts.get(name) > 1 ? path : name,
    files,
  }));
  return named.sort((one, other) => one.name.localeCompare(other.name));
}

// Moodle's folders and files: "Ann Lee_123_assignsubmission_file_", then the file's own name.
const MOODLE = /^(.+?)_(\d+)_assignsubmission_(?:file|onlinetext)_?(.*)$/s;

function makeFolder(name, path) {
  return { name, path, folders: new Map(), files: [], empty: new Map() };
}

/** Add a file or, after all files, an empty folder, which counts where no folder above is empty. */
function addFile(folder, [first, ...others], content) {
  const [, student, number, file] = MOODLE.exec(first) ?? [];
  const rest = file ? [file, ...others] : others;
  const name = student ?? first;
  const key = student === undefined ? name : `${name} (${number})`; // others may be called so, too
  const path = folder.path === "" ? key : `${folder.path}/${key}`;
  const inner = folder.folders.get(key) ?? makeFolder(name, path);
  if (content === null && !folder.folders.has(key)) return folder.empty.set(key, inner);
  if (rest.length === 0) return content !== null && folder.files.push({ name, path, content });
  folder.folders.set(key, inner);
  addFile(inner, rest, content);
}

function* walk(above, most) {
  const folder = descend(above);
  if (folder.folders.size === 0 && folder.name !== "" && folder.files.length <= most) {
    return yield makeStudent(folder);
  }
  for (const file of folder.files) {
    yield { name: stem(file.name), path: file.path, files: [file] };
  }
  for (const each of folder.folders.values()) {
    const inner = folder.path === "" ? descend(each) : each;
    if (inner.folders.size > 1) yield* walk(inner, most);
    else yield makeStudent(each);
  }
  yield* folder.empty.values();
}

/** Return the first folder from this one down that has more in it than one folder. */
function descend(folder) {
  const hasOne = folder.folders.size === 1 && folder.files.length + folder.empty.size === 0;
  return hasOne ? descend([...folder.folders.values()][0]) : folder;
}

function makeStudent(folder) {
  return { name: folder.name, path: folder.path, files: [...listFiles(folder)] };
}

function* listFiles(folder) {
  yield* folder.files;
  for (const each of folder.folders.values()) yield* listFiles(each);
}

/**
 * Return which file each field of a problem gets, `[{ field, file }]`, or `{ wrong }`. Several
 * fields get the files that are named as they are; the last of both belong together. Files end in
 * one of the `extensions`, if there are any.
 */
export function assignFiles(files, fields, extensions = []) {
  if (files.length === 0) return { wrong: say("nothing handed in") };
  const allowed = extensions.map((extension) => extension.toLowerCase());
  const isOther = ({ name }) => !allowed.includes(name.split(".").at(-1).toLowerCase());
  const other = allowed.length > 0 ? files.find(isOther) : undefined;
  if (other) {
    const values = { name: other.name, extensions: extensions.join(", ") };
    return { wrong: say("{name}: the problem takes {extensions}", values) };
  }
  const wanted = fields.length > 0 ? fields : ["source"];
  if (files.length !== wanted.length) {
    const values = { n: files.length, wanted: wanted.length, names: wanted.join(", ") };
    return { wrong: say("{n} files, but the problem takes {wanted} ({names})", values) };
  }
  const pairs = [];
  const left = [...files];
  const open = wanted.filter((field) => {
    const at = left.findIndex((file) => stem(file.name) === field);
    if (at >= 0) pairs.push({ field, file: left.splice(at, 1)[0] });
    return at < 0;
  });
  if (open.length > 1) return { wrong: say("no file is named {name}", { name: open[0] }) };
  if (open.length === 1) pairs.push({ field: open[0], file: left[0] });
  return { pairs };
}

/** Return a file's name without its extension. */
export function stem(name) {
  return name.replace(/(.)\.[^.]*$/, "$1");
}
