import assert from "node:assert/strict";
import { test } from "node:test";

import { countPixels } from "./static/pictures.js";

const WEBP = "52494646 00000000 57454250";
const JPEG = "ffd8ffe0 0004 0000";
const SVG = '<svg xmlns="http://www.w3.org/2000/svg"><path d="M 0 0"/>';

const PICTURES = [
  ["PNG", "89504e470d0a1a0a 0000000d 49484452 0000012c 00000002", 600],
  ["GIF", "474946383961 2c01 0200", 600],
  ["JPEG", `${JPEG} ffc4 0003 00 ffff c2 000b 08 0002 012c 03`, 600],
  ["WebP with losses", `${WEBP} 56503820 00000000 000000 9d012a 2c01 0240`, 600],
  ["WebP without", `${WEBP} 5650384c 00000000 2f 2b410000`, 600],
  ["extended WebP", `${WEBP} 56503858 00000000 00000000 2b0100 010000`, 600],
  ["a PNG that is cut off", "89504e470d0a1a0a 0000000d 49484452 0000012c", null],
  ["a PNG without width", "89504e470d0a1a0a 0000000d 49484452 00000000 00000002", null],
  ["a JPEG that is cut off", `${JPEG} ffe0 ffff`, null],
  ["a broken JPEG", `${JPEG} 00`, null],
  ["unknown WebP", `${WEBP} 56503859 00000000`, null],
  ["a bitmap", "424d 00000000", null],
  ["nothing", "", null],
];

for (const [name, hex, expected] of PICTURES) {
  test(`pixels of ${name}`, () => {
    const content = new Uint8Array(Buffer.from(`00${hex.replaceAll(" ", "")}`, "hex")).subarray(1);
    assert.equal(countPixels(content, "image/png"), expected);
    assert.equal(countPixels(content, "image/gif"), expected); // the content decides
  });
}

for (const [text, expected] of [
  [SVG, 0],
  [`${SVG}<image href="DATA:image/png;base64,"/>`, null],
  [`${SVG}<image href="d&#97;ta:image/png"/>`, null],
  [`<!DOCTYPE svg [<!ENTITY a "x">]>${SVG}`, null],
  [`${SVG}<style>svg { background: url(d\\61ta:image/png) }</style>`, null],
]) {
  test(`an SVG: ${text.slice(-50)}`, () => {
    assert.equal(countPixels(Buffer.from(text), "image/svg+xml"), expected);
    assert.equal(countPixels(Buffer.from(text, "utf16le"), "image/svg+xml"), null);
  });
}
