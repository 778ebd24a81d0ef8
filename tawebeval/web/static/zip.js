/** Reader of ZIP files, with bounds for what a stranger has packed. */

export const MOST_FILES = 2000;
export const MOST_BYTES = 64 * 1024 * 1024; // of all files, unpacked
export const DEEPEST = 16; // folders above a file

const END_SIZE = 22;
const LONGEST_COMMENT = 65_535;
const MOST_DIRECTORY = 4 * 1024 * 1024; // bytes
const ENCRYPTED = 1;
const UTF8 = 0x800;

/** A ZIP file that is not read; the message is for people. */
export class BadZip extends Error {}

/**
 * Return the files of a ZIP, a Blob: `[{ path, content }]`, `content` a Blob. `left` has the files
 * and bytes that may still be read, `{ files, bytes }`, and is reduced by them. Throws BadZip.
 */
export async function readZip(blob, left) {
  const found = [];
  for (const entry of await readDirectory(blob, left)) {
    found.push({ path: entry.path, content: await unpack(blob, entry) });
  }
  return found;
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
    const isZip = path.includes("/") && isZipName(path);
    const inner = isZip ? await readSoundZip(path, content, left) : null;
    if (inner === null) unpacked.push({ path, content });
    else for (const file of inner) unpacked.push({ ...file, path: `${folder}/${file.path}` });
  }
  return unpacked;
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

/** Return the entries that are files. Sizes are as the directory says; `unpack` checks them. */
async function readDirectory(blob, left) {
  const tail = await view(blob, Math.max(0, blob.size - END_SIZE - LONGEST_COMMENT), blob.size);
  let end = tail.byteLength - END_SIZE;
  while (end >= 0 && tail.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0) throw new BadZip("it is not a ZIP file, or is cut off");
  const count = tail.getUint16(end + 10, true);
  const size = tail.getUint32(end + 12, true);
  const start = tail.getUint32(end + 16, true);
  if (size > MOST_DIRECTORY || start + size > blob.size) throw new BadZip("its directory is broken");
  const directory = await view(blob, start, start + size);
  const entries = [];
  let at = 0;
  let packed = 0; // bytes of all entries, which overlap in a ZIP bomb
  for (let number = 0; number < count; number++) {
    if (at + 46 > size || directory.getUint32(at, true) !== 0x02014b50) {
      throw new BadZip("its directory is broken");
    }
    const flags = directory.getUint16(at + 8, true);
    const nameLength = directory.getUint16(at + 28, true);
    const name = new Uint8Array(directory.buffer, at + 46, Math.min(nameLength, size - at - 46));
    const path = cleanPath(new TextDecoder(flags & UTF8 ? "utf-8" : "latin1").decode(name));
    const entry = {
      path,
      method: directory.getUint16(at + 10, true),
      crc: directory.getUint32(at + 16, true),
      packed: directory.getUint32(at + 20, true),
      size: directory.getUint32(at + 24, true),
      offset: directory.getUint32(at + 42, true),
    };
    at += 46 + nameLength + directory.getUint16(at + 30, true) + directory.getUint16(at + 32, true);
    if (path === null) continue;
    if (flags & ENCRYPTED) throw new BadZip(`${path} is encrypted`);
    packed += entry.packed;
    if (packed > blob.size) throw new BadZip("its files overlap");
    takeRoom(left, entry.size);
    entries.push(entry);
  }
  return entries;
}

/** Count a file of so many bytes. Throws BadZip beyond the bounds. */
export function takeRoom(left, size) {
  left.files -= 1;
  left.bytes -= size;
  if (left.files < 0) throw new BadZip(`there are over ${MOST_FILES} files`);
  if (left.bytes < 0) throw new BadZip(`the files have over ${MOST_BYTES / 1024 ** 2} MiB`);
}

/** Return the path of a file; null for a folder, and for what systems add. Throws BadZip. */
export function cleanPath(text) {
  const parts = text.replaceAll("\\", "/").split("/").filter((part) => part !== "" && part !== ".");
  if (/[\\/]$/.test(text) || parts.length === 0) return null;
  if (parts[0] === "__MACOSX" || parts.some((part) => part.startsWith("."))) {
    if (parts.includes("..")) throw new BadZip("a path leads out of it");
    return null;
  }
  if (parts.length > DEEPEST) throw new BadZip(`a file lies in over ${DEEPEST - 1} folders`);
  return parts.join("/");
}

async function unpack(blob, { path, method, crc, packed, size, offset }) {
  const head = await view(blob, offset, offset + 30);
  if (head.byteLength < 30 || head.getUint32(0, true) !== 0x04034b50) {
    throw new BadZip(`${path} is broken`);
  }
  const begin = offset + 30 + head.getUint16(26, true) + head.getUint16(28, true);
  const content = blob.slice(begin, begin + packed);
  if (content.size !== packed) throw new BadZip(`${path} is cut off`);
  if (method !== 0 && method !== 8) throw new BadZip(`${path} is packed by an unknown method`);
  const stream = content.stream();
  const bytes = await readExactly(
    method === 0 ? stream : stream.pipeThrough(new DecompressionStream("deflate-raw")),
    size,
  ).catch(() => null);
  if (bytes === null || computeCrc(bytes) !== crc) throw new BadZip(`${path} is broken`);
  return new Blob([bytes]);
}

/** Return the `size` bytes of a stream; null if it has others. Reads no more than a chunk beyond. */
async function readExactly(stream, size) {
  const bytes = new Uint8Array(size);
  let length = 0;
  const reader = stream.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return length === size ? bytes : null;
    if (length + value.length > size) {
      reader.cancel().catch(() => {});
      return null;
    }
    bytes.set(value, length);
    length += value.length;
  }
}

async function view(blob, begin, end) {
  return new DataView(await blob.slice(begin, end).arrayBuffer());
}

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let crc = byte;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  return crc;
});

function computeCrc(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}
