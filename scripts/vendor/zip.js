/** The reader of ZIP files; zip.js loads it. It runs in the page itself, which permits no workers. */

import { BlobReader, BlobWriter, ZipReader, configure } from "@zip.js/zip.js/lib/zip-core-native.js";

configure({ useWebWorkers: false });

export { BlobReader, BlobWriter, ZipReader };
