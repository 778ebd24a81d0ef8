import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateRawSync } from "node:zlib";

import {
  BadZip,
  DEEPEST,
  MOST_BYTES,
  MOST_FILES,
  cleanPath,
  readZip,
  unpackZips,
} from "./static/zip.js";

function crc32(bytes) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

/** Return a ZIP of `[path, text]`; `change` may change what the directory has of each. */
function makeZip(files, change = (entry) => entry, comment = "") {
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [path, text, method = 8] of files) {
    const name = Buffer.from(path);
    const content = Buffer.from(text);
    const data = method === 8 ? deflateRawSync(content) : content;
    const entry = change({
      ...{ flags: 0x800, method, crc: crc32(content), packed: data.length },
      ...{ size: content.length, offset },
    });
    const extra = entry.extra ?? Buffer.alloc(0);
    const head = Buffer.alloc(30);
    head.writeUInt32LE(0x04034b50);
    head.writeUInt16LE(20, 4);
    head.writeUInt16LE(entry.flags, 6);
    head.writeUInt16LE(entry.method, 8);
    head.writeUInt32LE(entry.crc, 14);
    head.writeUInt32LE(entry.packed, 18);
    head.writeUInt32LE(entry.size, 22);
    head.writeUInt16LE(name.length, 26);
    head.writeUInt16LE(extra.length, 28);
    parts.push(head, name, extra, data);
    offset += head.length + name.length + extra.length + data.length;
    const row = Buffer.alloc(46);
    row.writeUInt32LE(0x02014b50);
    row.writeUInt16LE(entry.flags, 8);
    row.writeUInt16LE(entry.method, 10);
    row.writeUInt32LE(entry.crc, 16);
    row.writeUInt32LE(entry.packed, 20);
    row.writeUInt32LE(entry.size, 24);
    row.writeUInt16LE(name.length, 28);
    row.writeUInt8(3, 5); // made by UNIX
    row.writeUInt16LE(extra.length, 30);
    row.writeUInt32LE(entry.attributes ?? 0, 38);
    row.writeUInt32LE(entry.offset, 42);
    directory.push(row, name, extra);
  }
  const rows = Buffer.concat(directory);
  const end = Buffer.alloc(22);
  end.writeUInt32LE(0x06054b50);
  end.writeUInt16LE(files.length, 10);
  end.writeUInt32LE(rows.length, 12);
  end.writeUInt32LE(offset, 16);
  end.writeUInt16LE(comment.length, 20);
  return new Blob([...parts, rows, end, comment]);
}

async function read(blob, left = { files: MOST_FILES, bytes: MOST_BYTES }) {
  const files = await readZip(blob, left);
  return Promise.all(files.map(async ({ path, content }) => [path, await content.text()]));
}

test("files are read as they were packed", async () => {
  const files = [
    ["ann/a.py", "print()\n"],
    ["bob/é.txt", "stored", 0],
    ["empty", ""],
    ["large", "x".repeat(300_000)],
  ];
  const expected = files.map(([path, text]) => [path, text]);
  assert.deepEqual(await read(makeZip(files)), expected);
  assert.deepEqual(await read(makeZip(files, undefined, "a comment")), expected);
});

test("hidden files are left out, and folders but for those without files", async () => {
  const files = ["a/", "__MACOSX/a/b", ".git/config", "a/.DS_Store", "a/Thumbs.db", "a/__pycache__/x", "a/b"];
  const more = ["c/", "c/.DS_Store", ".x/", "a\\d\\", "e/", "e/f/"];
  const found = await readZip(makeZip([...files, ...more].map((path) => [path, ""])), { files: 5, bytes: 0 });
  const kept = found.map(({ path, content }) => [path, content?.size ?? null]);
  assert.deepEqual(kept.sort(), [["a/b", 0], ["a/d", null], ["c", null], ["e", null], ["e/f", null]]);
});

test("names are UTF-8 or CP437, and links are left out", async () => {
  const plain = (entry) => ({ ...entry, flags: 0 });
  assert.deepEqual(await read(makeZip([["é.txt", "x"]], plain)), [["é.txt", "x"]]);
  const name = Buffer.from([0x82, 0x2e, 0x63]);
  assert.deepEqual(await read(makeZip([[name, "x"]], plain)), [["é.c", "x"]]);
  const links = (entry) => ({ ...entry, attributes: (0o120777 << 16) >>> 0 });
  assert.deepEqual(await read(makeZip([["link", "/etc/passwd"]], links)), []);
});

test("sizes and places may be those of Zip64", async () => {
  const content = "x".repeat(1000);
  const zip64 = (entry) => {
    const extra = Buffer.alloc(28);
    extra.writeUInt16LE(1);
    extra.writeUInt16LE(24, 2);
    const sizes = [entry.size, entry.packed, entry.offset];
    for (const [n, size] of sizes.entries()) extra.writeBigUInt64LE(BigInt(size), 4 + 8 * n);
    const beyond = 0xffffffff;
    return { ...entry, size: beyond, packed: beyond, offset: beyond, extra };
  };
  assert.deepEqual(await read(makeZip([["a", content]], zip64)), [["a", content]]);
});

test("paths are cleaned, and lead nowhere else", () => {
  assert.equal(cleanPath("/a\\b//./c"), "a/b/c");
  assert.throws(() => cleanPath("a/../b"), BadZip);
  assert.throws(() => cleanPath("a/".repeat(DEEPEST) + "b"), BadZip);
  assert.equal(cleanPath("a/".repeat(DEEPEST - 1) + "b")?.length, 2 * DEEPEST - 1);
});

const FILE = [["a", "x".repeat(1000)]];
for (const [why, blob, message] of [
  ["nothing", new Blob([]), /no ZIP file/],
  ["no ZIP", new Blob(["x".repeat(100_000)]), /no ZIP file/],
  ["cut off", makeZip(FILE).slice(0, 60), /no ZIP file/],
  ["cut off at the begin", makeZip(FILE).slice(5), /broken/],
  ["encrypted", makeZip(FILE, (entry) => ({ ...entry, flags: 1 })), /encrypted/],
  ["another method", makeZip(FILE, (entry) => ({ ...entry, method: 12 })), /broken: .*method/],
  ["a wrong sum", makeZip(FILE, (entry) => ({ ...entry, crc: 1 })), /broken/],
  ["more than it says", makeZip(FILE, (entry) => ({ ...entry, size: 10 })), /broken/],
  ["less than it says", makeZip(FILE, (entry) => ({ ...entry, size: 2000 })), /broken/],
  ["a wrong place", makeZip(FILE, (entry) => ({ ...entry, offset: 3 })), /broken/],
  ["a place beyond", makeZip(FILE, (entry) => ({ ...entry, offset: 2 ** 31 })), /broken/],
  ["overlaps", makeZip([...FILE, ...FILE], (entry) => ({ ...entry, offset: 0 })), /broken/],
  ["no deflate", makeZip([["a", "\xff".repeat(9), 0]], (entry) => ({ ...entry, method: 8 })), /broken/],
]) {
  test(`refused: ${why}`, async () => {
    await assert.rejects(read(blob), (error) => {
      assert.ok(error instanceof BadZip, String(error));
      assert.match(error.message, message);
      return true;
    });
  });
}

test("bounds hold over several ZIPs, before anything is unpacked", async () => {
  const left = { files: 3, bytes: 2500 };
  await read(makeZip(FILE), left);
  await read(makeZip(FILE), left);
  await assert.rejects(read(makeZip(FILE), left), /over 64 MiB/);
  await assert.rejects(read(makeZip(FILE), { files: 0, bytes: 9999 }), /over 2,000 files/);
  const huge = makeZip(FILE, (entry) => ({ ...entry, size: 2 ** 32 - 1 }));
  await assert.rejects(read(huge), /over 64 MiB/);
});

test("ZIP files in folders are folders, broken ones stay files", async () => {
  const content = makeZip([["main.py", "print()"]]);
  const nested = makeZip([["a.py", "x"], ["b.zip", "deep"]]);
  const broken = new Blob(["PK"]);
  const empty = makeZip([]);
  const files = [
    { path: "hw/ann.zip", content },
    { path: "hw/bob/bob.ZIP", content: nested },
    { path: "hw/carl.zip", content: broken },
    { path: "hw/dan/x.py", content: broken },
    { path: "hw/dan.zip", content },
    { path: "top.zip", content },
    { path: "hw/eve.zip", content: empty },
    { path: "hw/fay.zip", content: null },
  ];
  const left = { files: 4, bytes: 100 };
  const paths = (await unpackZips(files, left)).map(({ path }) => path);
  assert.deepEqual(paths, [
    ...["hw/ann/main.py", "hw/bob/bob/a.py", "hw/bob/bob/b.zip", "hw/carl.zip"],
    ...["hw/dan/x.py", "hw/dan.zip/main.py", "top.zip", "hw/eve", "hw/fay.zip"],
  ]);
  assert.deepEqual(left, { files: 0, bytes: 100 - 7 - 5 - 7 });
  await assert.rejects(unpackZips([{ path: "hw/ann.zip", content }], left), {
    name: "Error",
    message: `hw/ann.zip: there are over 2,000 files`,
  });
});

test("broken ZIP files in folders use up the room", async () => {
  const content = makeZip([["a", "x".repeat(60)]], (entry) => ({ ...entry, crc: 0 }));
  const files = Array.from({ length: 9 }, (_, n) => ({ path: `hw/${n}.zip`, content }));
  await assert.rejects(unpackZips(files, { files: 9, bytes: 100 }), BadZip);
});
