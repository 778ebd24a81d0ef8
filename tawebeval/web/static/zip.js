/** ZIP files, with bounds for what a stranger has packed. */

import { say } from "./language.js";

export const MOST_FILES = 2000;
export const MOST_BYTES = 64 * 1024 * 1024; // of all files, unpacked
export const DEEPEST = 16; // folders above a file

const MOST_ENTRIES = 20_000; // folders and what is left out, too
const LEFT_OUT = ["__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini"];

/** A ZIP file that is not read; the message is for people. */
export class BadZip extends Error {}

/**
 * Return the files of a ZIP, a Blob: `[{ path, content }]`, `content` a Blob, null for a folder that
 * has no files. `left` has the files and bytes that may still be read, `{ files, bytes }`, and is
 * reduced by them. Throws BadZip.
 */
export async function readZip(blob, left) {
  const { BlobReader, ZipReader } = await import("./vendor-zip.js");
  const reader = new ZipReader(new BlobReader(blob));
  const entries = [];
  try {
    for await (const entry of reader.getEntriesGenerator()) {
      if (entries.push(entry) <= MOST_ENTRIES) continue;
      throw new Error(say("it has over {n} entries", { n: MOST_ENTRIES }));
    }
  } catch (error) {
    throw new BadZip(say("it is no ZIP file, or a broken one: {why}", { why: error.message }));
  }
  const found = [];
  const folders = new Set();
  for (const entry of entries) {
    const name = nameOf(entry);
    const path = entry.symlink ? null : cleanPath(name);
    if (path === null) continue;
    if (entry.directory || /[\\/]$/.test(name)) {
      folders.add(path);
      continue;
    }
    if (entry.encrypted) throw new BadZip(say("{path} is encrypted", { path }));
    takeRoom(left, entry.uncompressedSize);
    found.push({ path, entry });
  }
  for (const folder of found.flatMap(({ path }) => foldersOf(path))) folders.delete(folder);
  const files = [];
  for (const path of folders) {
    takeRoom(left, 0);
    files.push({ path, content: null });
  }
  for (const { path, entry } of found) files.push({ path, content: await unpack(path, entry) });
  return files;
}

/** Return the name of an entry. Some programs write UTF-8 and do not say so; others, CP437. */
function nameOf({ filename, filenameUTF8, rawFilename }) {
  if (filenameUTF8) return filename;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(rawFilename);
  } catch {
    return filename;
  }
}

/** Return the content of an entry, of the size that the ZIP says. Throws BadZip. */
async function unpack(path, entry) {
  const parts = [];
  let left = entry.uncompressedSize;
  const write = (part) => {
    left -= part.length;
    if (left < 0) throw new BadZip(say("it is larger than it says"));
    parts.push(part.slice());
  };
  try {
    const options = { checkCrc32: true, checkOverlappingEntry: true };
    await entry.getData(new WritableStream({ write }), options);
    if (left > 0) throw new BadZip(say("it is smaller than it says"));
  } catch (error) {
    throw new BadZip(say("{path} is broken: {why}", { path, why: error.message }));
  }
  return new Blob(parts);
}

/** Whether a file is a ZIP by its name. */
export function isZipName(name) {
  return /\.zip$/i.test(name);
}

/**
 * Return `files`, `[{ path, content }]`, with a folder in place of each ZIP in a folder. One that
 * is broken stays as it is, and so does a ZIP in it. `left` is as for `readZip`. Throws BadZip.
 */
export async function unpackZips(files, left) {
  const taken = new Set(files.flatMap(({ path }) => foldersOf(path)));
  const unpacked = [];
  for (const { path, content } of files) {
    const bare = path.slice(0, -4);
    const folder = taken.has(bare) ? path : bare;
    const isZip = content !== null && path.includes("/") && isZipName(path);
    const inner = isZip ? await readSoundZip(path, content, left) : null;
    unpacked.push(...(inner === null ? [{ path, content }] : putInto(folder, inner)));
  }
  return unpacked;
}

/** Return the files of a ZIP as those of a folder, which is there without files, too. */
export function putInto(folder, files) {
  if (files.length === 0) return [{ path: folder, content: null }];
  return files.map(({ path, content }) => ({ path: `${folder}/${path}`, content }));
}

/** Return the folders above a file. */
function foldersOf(path) {
  const parts = path.split("/").slice(0, -1);
  return parts.map((_, n) => parts.slice(0, n + 1).join("/"));
}

/** Return the files of a ZIP; null if it is broken. Throws BadZip beyond the bounds. */
async function readSoundZip(path, blob, left) {
  try {
    return await readZip(blob, left);
  } catch (error) {
    if (!(error instanceof BadZip)) throw error;
    if (left.files < 0 || left.bytes < 0) throw new BadZip(`${path}: ${error.message}`);
    return null; // what it says to have stays counted: many such could take for ever
  }
}

/** Count a file of so many bytes. Throws BadZip beyond the bounds. */
export function takeRoom(left, size) {
  left.files -= 1;
  left.bytes -= size;
  if (left.files < 0) throw new BadZip(say("there are over {n} files", { n: MOST_FILES }));
  if (left.bytes < 0) throw new BadZip(say("the files have over {size} MiB", { size: MOST_BYTES / 1024 ** 2 }));
}

/** Return the path of a file or folder; null for what systems add. Throws BadZip. */
export function cleanPath(text) {
  const parts = text.replaceAll("\\", "/").split("/").filter((part) => part !== "" && part !== ".");
  if (parts.length === 0) return null;
  if (parts.some((part) => part.startsWith(".") || LEFT_OUT.includes(part))) {
    if (parts.includes("..")) throw new BadZip(say("a path leads out of it"));
    return null;
  }
  if (parts.length > DEEPEST) throw new BadZip(say("a file lies in over {n} folders", { n: DEEPEST - 1 }));
  return parts.join("/");
}
