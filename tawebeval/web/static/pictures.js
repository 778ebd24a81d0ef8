/** How much memory a picture takes once it is decoded, by the beginning of its file. */

const SIGNS = [
  ["\x89PNG\r\n\x1a\n", readPng],
  ["GIF8", readGif],
  ["RIFF", readWebp],
  ["\xff\xd8\xff", readJpeg],
];
// A picture could be within, also where its address is written in another way.
const MAY_EMBED = /data:|&#|\\|<!entity|\0/i;
const NOT_FRAMES = [0xc4, 0xc8, 0xcc]; // markers of a JPEG among those of its frames

/**
 * Return the number of pixels of a picture, a Uint8Array; null if that is unknown. Browsers go by
 * the content, and not by the type, unless that is of an SVG. An SVG has none of its own: it is
 * drawn as large as it is shown.
 */
export function countPixels(content, type) {
  if (type === "image/svg+xml") return isPlainSvg(content) ? 0 : null;
  const view = new DataView(content.buffer, content.byteOffset, content.byteLength);
  const head = String.fromCharCode(...content.subarray(0, 8));
  const [, read] = SIGNS.find(([sign]) => head.startsWith(sign)) ?? [];
  try {
    const [width, height] = read?.(view) ?? [];
    return width * height || null;
  } catch {
    return null; // it is cut off
  }
}

function isPlainSvg(content) {
  try {
    return !MAY_EMBED.test(new TextDecoder("utf-8", { fatal: true }).decode(content));
  } catch {
    return false;
  }
}

function readPng(view) {
  return [view.getUint32(16), view.getUint32(20)];
}

function readGif(view) {
  return [view.getUint16(6, true), view.getUint16(8, true)];
}

function readWebp(view) {
  const kind = view.getUint32(12);
  if (kind === 0x56503858) return [23, 26].map((at) => (view.getUint32(at, true) >>> 8) + 1);
  if (kind === 0x56503820) return [26, 28].map((at) => view.getUint16(at, true) & 0x3fff);
  if (kind !== 0x5650384c) return null;
  const bits = view.getUint32(21, true);
  return [(bits & 0x3fff) + 1, ((bits >>> 14) & 0x3fff) + 1];
}

function readJpeg(view) {
  let at = 2;
  for (;;) {
    if (view.getUint8(at) !== 0xff) return null;
    const marker = view.getUint8(at + 1);
    const isFrame = marker >= 0xc0 && marker <= 0xcf && !NOT_FRAMES.includes(marker);
    if (isFrame) return [view.getUint16(at + 7), view.getUint16(at + 5)];
    at += marker === 0xff ? 1 : 2 + view.getUint16(at + 2);
  }
}
