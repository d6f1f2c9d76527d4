/** Programs as they are started: one script, V8's code beside it, and stacks that name lines of sources. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterAll, beforeAll, beforeEach, expect, it } from 'vitest';

const scripts = new URL('../../scripts/lib/one-script.mjs', import.meta.url).href;
const { oneScriptEach, keepCode } = (await import(scripts)) as {
  oneScriptEach: (sources: object, folder: string, plugin: object) => Promise<{ files: Map<string, string> }>;
  keepCode: (program: string, config: object) => Promise<void>;
};

/** As the set-up asks: by a process of its own, for code is kept by V8's flags, and other tests may have changed those of this one. */
function isCodeKept(): boolean {
  const ask = `import { isCodeKept } from '${scripts}'; process.stdout.write(String(isCodeKept('${program()}')));`;
  const asked = spawnSync(process.execPath, ['--input-type=module', '--eval', ask], { encoding: 'utf8' });
  expect(asked.stderr).toBe('');
  return asked.stdout === 'true';
}

let folder: string;
beforeAll(() => {
  folder = realpathSync(mkdtempSync(join(tmpdir(), 'kvtier-script-')));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const program = (): string => join(folder, 'made/a/main.mjs');
const start = (...flags: string[]): { status: number | null; stdout: string; stderr: string } =>
  spawnSync(process.execPath, [...flags, program()], { encoding: 'utf8', timeout: 20_000 });

async function make(files: Record<string, string>): Promise<void> {
  for (const [name, text] of Object.entries(files)) {
    mkdirSync(dirname(join(folder, name)), { recursive: true });
    writeFileSync(join(folder, name), text);
  }
  const plugin = {
    name: 'not in the script',
    setup: ({ onResolve }: import('esbuild').PluginBuild) =>
      onResolve({ filter: /^late$/ }, ({ path }) => ({ path, external: true })),
  };
  const made = await oneScriptEach({ 'a/main': join(folder, 'main.ts') }, join(folder, 'made'), plugin);
  for (const [path, contents] of made.files) {
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(path, contents);
  }
}

/** Each test has an outcome of its own, and so a script. */
let outcome = 0;
beforeEach(() => {
  outcome += 1;
});

it('a stack names lines of our sources, and those of packages as they are in the script', async () => {
  await make({
    'node_modules/p/index.js': 'exports.call = (what) => what();',
    'thrown.ts': `interface Nothing {}\n\n\nexport class Thing {\n  fail(): never {\n    throw new RangeError('on purpose ${outcome}');\n  }\n}\n`,
    'main.ts':
      "import { call } from 'p';\nimport { Thing } from './thrown.ts';\n\nasync function begin() {\n  call(() => new Thing().fail());\n}\nbegin().catch((error) => console.log(error.stack));\n",
  });
  const lines = start().stdout.trim().split('\n');
  expect(lines.slice(0, 3)).toEqual([
    `RangeError: on purpose ${outcome}`,
    `    at Thing.fail (${folder}/thrown.ts:6:5)`,
    `    at ${folder}/main.ts:5:3`,
  ]);
  expect(lines[3]).toMatch(/^ {4}at exports2[.]call \(.*\/made\/shared\/[0-9a-f]+[.]cjs:\d+:\d+\)$/);
  expect(lines[4]).toBe(`    at begin (${folder}/main.ts:5:3)`);
});

it('the code that V8 made is taken by a Node of the same flags, and other flags have theirs', async () => {
  await make({ 'main.ts': `console.log('runs ${outcome}');\n` });
  expect(isCodeKept()).toBe(false);
  expect(start().stdout).toBe(`runs ${outcome}\n`); // without it, too
  await keepCode(program(), {});
  expect(isCodeKept()).toBe(true);
  const [starts, script] = ['mjs', 'cjs'].map((end) => readNames(end));
  const ask = `import { isCodeKept } from '${starts}'; process.stdout.write(String(isCodeKept(new URL('${script}'))));`;
  const answer = (...flags: string[]): string =>
    spawnSync(process.execPath, [...flags, '--input-type=module', '--eval', ask], { encoding: 'utf8' }).stdout;
  expect(answer()).toBe('true');
  expect(answer('--min-semi-space-size=32', '--max-semi-space-size=32')).toBe('true');
  expect(answer('--max-semi-space-size=8')).toBe('false');
  for (const flags of [[], ['--max-semi-space-size=8']]) expect(start(...flags).stdout).toBe(`runs ${outcome}\n`);
});

it('what is loaded when it is wanted comes from where it lies, also into code that was kept', async () => {
  await make({
    'node_modules/late/package.json': '{"name": "late", "type": "module", "exports": "./index.js"}',
    'node_modules/late/index.js': 'export const said = "from where it lies";',
    'main.ts': `import('late').then(({ said }) => console.log(said, ${outcome}));\n`,
  });
  const wanted = { status: 0, stdout: `from where it lies ${outcome}\n`, stderr: '' };
  expect(start()).toMatchObject(wanted);
  await keepCode(program(), {});
  expect(isCodeKept()).toBe(true);
  expect(start()).toMatchObject(wanted);
});

it('code that is damaged is not taken, and what was made of another source is not looked at', async () => {
  await make({ 'main.ts': `console.log('first ${outcome}');\n` });
  await keepCode(program(), {});
  for (const file of readdirSync(join(folder, 'made/shared')).filter((name) => name.endsWith('.code')))
    writeFileSync(join(folder, 'made/shared', file), 'no code');
  expect(start()).toMatchObject({ status: 0, stdout: `first ${outcome}\n`, stderr: '' });
  await make({ 'main.ts': `console.log('other ${outcome}');\n` }); // of the same length: V8 itself would not see it
  expect(isCodeKept()).toBe(false);
  expect(start().stdout).toBe(`other ${outcome}\n`);
});

/** As URL, of the file below `shared` that the program names. */
function readNames(end: string): string {
  const text = readFileSync(program(), 'utf8');
  return new URL(new RegExp(`"([^"]+[.]${end})"`).exec(text)![1]!, `file://${program()}`).href;
}
