/** What CI demands besides tests: lint, the protocol's own lint, generated code that matches proto/, types. */
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { command, root, SetupError } from './command.mjs';
import { step } from './progress.mjs';

const bin = (name) => join(root, 'node_modules/.bin', name);
const generated = 'packages/base/wire/src/generated';

/** Writes the code generated from proto/ below `target`, at the same relative path as in the repository. */
async function generateInto(target) {
  await command(bin('buf'), ['generate', 'proto', '--template', 'proto/buf.gen.yaml', '-o', target]);
}

export async function generate() {
  const target = mkdtempSync(join(tmpdir(), 'kvtier-generate-'));
  try {
    await generateInto(target);
    rmSync(join(root, generated), { recursive: true, force: true });
    cpSync(join(target, generated), join(root, generated), { recursive: true });
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
    const fresh = join(target, generated);
    const ours = join(root, generated);
    const names = [...new Set([...filesBelow(fresh), ...filesBelow(ours)])];
    const read = (folder, name) => {
      try {
        return readFileSync(join(folder, name), 'utf8');
      } catch {
        return null;
      }
    };
    const stale = names.filter((name) => read(fresh, name) !== read(ours, name));
    if (stale.length > 0) {
      throw new SetupError(`${generated}: not what proto/ generates (${stale.join(', ')}); run: npm run generate`);
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
