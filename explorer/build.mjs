// Build posenc/explore/explore.html: one page with its script, style and licences inside.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const page = join(here, "../posenc/explore/explore.html");
const LARGEST = 1e6;

// The files of this folder, as tests/explore/test_page.py lists them.
function sources(folder = here) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    if (entry.name === "node_modules" || entry.name === "__pycache__") return [];
    const path = join(folder, entry.name);
    return entry.isDirectory() ? sources(path) : [path];
  });
}

function hash() {
  const sum = createHash("sha256");
  const named = sources().map((path) => [relative(here, path).replaceAll("\\", "/"), path]);
  for (const [name, path] of named.sort(([a], [b]) => (a < b ? -1 : 1)))
    sum.update(`${name}\0`).update(readFileSync(path)).update("\0");
  return sum.digest("hex");
}

// Name, version and licence text of each package in the bundle.
function licences(inputs) {
  const packages = new Set(
    Object.keys(inputs).map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]).filter(Boolean),
  );
  return [...packages].sort().map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
    return `${name} ${version} (${license})\n${readFileSync(join(folder, file), "utf8").trim()}`;
  }).join("\n\n").replaceAll("--", "- -");
}

const options = { bundle: true, minify: true, write: false, absWorkingDir: here, legalComments: "none" };
const script = await build({
  ...options, entryPoints: ["src/main.js"], format: "iife", target: "es2022", charset: "utf8", metafile: true,
});
const style = await build({ ...options, entryPoints: ["src/style.css"] });
const code = script.outputFiles[0].text.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
const parts = {
  STYLE: style.outputFiles[0].text.trim(),
  SCRIPT: code,
  CSP: `sha256-${createHash("sha256").update(code).digest("base64")}`,
  SOURCES: hash(),
  LICENSES: `Bundled packages and their licences:\n\n${licences(script.metafile.inputs)}\n`,
};
const html = readFileSync(join(here, "src/page.html"), "utf8").replace(/%([A-Z]+)%/g, (_, name) => parts[name]);
if (Buffer.byteLength(html) > LARGEST) throw new Error(`the page has ${Buffer.byteLength(html)} bytes`);
writeFileSync(page, html);
console.log(`${relative(join(here, ".."), page)}: ${Math.round(Buffer.byteLength(html) / 1000)} kB`);
