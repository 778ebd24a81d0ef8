/** Bundle the page's libraries into the directory that is named, with their licences. */

import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const [folder] = process.argv.slice(2);

/**
 * Let CodeMirror adopt a style sheet also outside of shadow trees: the page's
 * Content-Security-Policy blocks the style element that it would make.
 */
const adoptStyles = {
  name: "adopt-styles",
  setup({ onLoad }) {
    onLoad({ filter: /\/style-mod\/src\/style-mod\.js$/ }, ({ path }) => {
      const before = readFileSync(path, "utf8");
      const contents = before.replace("!root.head && root.adopted", "root.adopted");
      if (contents === before) throw new Error(`${path} has changed: adapt adoptStyles`);
      return { contents };
    });
  },
};

const packages = new Set();
for (const name of ["editor", "formula", "markdown", "zip"]) {
  const { metafile } = await build({
    entryPoints: [`${name}.js`],
    outfile: join(folder, `vendor-${name}.js`),
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    legalComments: "none",
    metafile: true,
    plugins: [adoptStyles],
  });
  for (const path of Object.keys(metafile.inputs)) {
    const found = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path);
    if (found) packages.add(found[1]);
  }
}

// Swagger UI is bundled already; its source map is not served.
for (const kind of ["js", "css"]) {
  const file = kind === "js" ? "swagger-ui-bundle.js" : "swagger-ui.css";
  const content = readFileSync(join("node_modules/swagger-ui-dist", file), "utf8");
  const text = content.replace(/\n\/[/*]# sourceMappingURL=.*\s*$/, "\n");
  writeFileSync(join(folder, `vendor-swagger-ui.${kind}`), text);
}
packages.add("swagger-ui-dist");

const licences = [...packages].sort().map((name) => {
  const place = join("node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(place, "package.json")));
  const file = readdirSync(place).find((entry) => /^licen[cs]e/i.test(entry));
  if (file === undefined) throw new Error(`${name} has no file with its licence`);
  // What a package has bundled itself, and a notice that has to go with it.
  const isFurther = (entry) => /^(notice|swagger-ui-bundle\.js\.licen[cs]e)/i.test(entry);
  const names = [file, ...readdirSync(place).filter(isFurther)];
  const texts = names.map((entry) => readFileSync(join(place, entry), "utf8").trim());
  return `${name} ${version} (${license})\n\n${texts.join("\n\n")}\n`;
});
const head = "Libraries in vendor-*, bundled by `make vendor`.\n";
const text = [head, ...licences].join(`\n${"-".repeat(72)}\n\n`);
writeFileSync(join(folder, "vendor-licences.txt"), text);
