/** What CI demands besides tests: lint, the protocol's own lint, generated code that matches proto/, types. */
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { command, root, SetupError } from './command.mjs';
import { step } from './progress.mjs';

const bin = (name) => join(root, 'node_modules/.bin', name);
const generated = 'packages/base/wire/src/generated';
const generatedForPython = 'packages/connector/python/src/kvtier/_generated';

/** Writes the code generated from proto/ below `target`, at the same relative paths as in the repository. */
async function generateInto(target) {
  await command(bin('buf'), ['generate', 'proto', '--template', 'proto/buf.gen.yaml', '-o', target]);
  await generatePython(join(target, generatedForPython));
}

/**
 * Python gets the messages' descriptors and not protoc's code: that goes with few versions of its library, descriptors with every one.
 */
async function generatePython(folder) {
  const file = join(folder, 'session.binpb');
  mkdirSync(folder, { recursive: true });
  const path = ['--path', 'proto/kvtier/v1/session.proto'];
  await command(bin('buf'), [
    'build',
    'proto',
    ...path,
    '--exclude-source-info',
    '--as-file-descriptor-set',
    '-o',
    file,
  ]);
  const lines = readFileSync(file, 'base64').match(/.{1,100}/g) ?? [];
  const text = lines.map((line) => `    "${line}"\n`).join('');
  const about =
    '"""Generated from proto/ by npm run generate: the session link\'s messages, a FileDescriptorSet in base64."""';
  writeFileSync(join(folder, 'session.py'), `${about}\n\nDESCRIPTORS = (\n${text})\n`);
  writeFileSync(join(folder, '__init__.py'), '"""Generated from proto/ by npm run generate."""\n');
  rmSync(file);
}

export async function generate() {
  const target = mkdtempSync(join(tmpdir(), 'kvtier-generate-'));
  try {
    await generateInto(target);
    for (const folder of [generated, generatedForPython]) {
      rmSync(join(root, folder), { recursive: true, force: true });
      cpSync(join(target, folder), join(root, folder), { recursive: true });
    }
  } finally {
    rmSync(target, { recursive: true, force: true });
  }
}

const filesBelow = (folder) =>
  readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath ?? entry.path, entry.name).slice(folder.length + 1))
    .sort();

async function generatedIsCurrent() {
  const target = mkdtempSync(join(tmpdir(), 'kvtier-generate-'));
  try {
    await generateInto(target);
    const read = (folder, name) => {
      try {
        return readFileSync(join(folder, name), 'utf8');
      } catch {
        return null;
      }
    };
    const isOurs = (name) => !name.includes('__pycache__');
    for (const folder of [generated, generatedForPython]) {
      const fresh = join(target, folder);
      const ours = join(root, folder);
      const names = [...new Set([...filesBelow(fresh), ...filesBelow(ours)])].filter(isOurs);
      const stale = names.filter((name) => read(fresh, name) !== read(ours, name));
      if (stale.length > 0) {
        throw new SetupError(`${folder}: not what proto/ generates (${stale.join(', ')}); run: npm run generate`);
      }
    }
  } finally {
    rmSync(target, { recursive: true, force: true });
  }
}

const checks = [
  ['lint', () => command(bin('biome'), ['check', '.'], { remedy: 'run: npx biome check --write .' })],
  ['proto lint', () => command(bin('buf'), ['lint', 'proto'])],
  ['generated code', generatedIsCurrent],
  ['types', () => command(bin('tsc'), ['--noEmit', '-p', 'tsconfig.json'])],
];

/** Runs every check, shows each failure, and returns how many failed. */
export async function runChecks() {
  let failed = 0;
  for (const [name, check] of checks) {
    try {
      await step(name, check);
      process.stdout.write(`ok      ${name}\n`);
    } catch (error) {
      failed += 1;
      process.stdout.write(`FAILED  ${name}\n${error instanceof SetupError ? error.message : error.stack}\n`);
    }
  }
  return failed;
}
