/** The bundles, as they are started. */
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { expect, it } from 'vitest';
import { program, started } from './programs.ts';

const names = ['cache-node', 'engine-worker', 'coordinator', 'kvtier'] as const;
const thread = join(dirname(program('kvtier').at(-1)!), '../threads/text-thread.mjs');

it.each([...names, 'the text thread'] as const)('of %s V8 takes the code that was kept', (name) => {
  const file = name === 'the text thread' ? thread : program(name).at(-1)!;
  const [starts, script] = [...readFileSync(file, 'utf8').matchAll(/"([^"]+)"/g)].map(
    ([, path]) => pathToFileURL(join(dirname(file), path!)).href,
  );
  const ask = `import { isCodeKept } from '${starts}'; process.stdout.write(String(isCodeKept(new URL('${script}'))));`;
  const flags = [[], started('coordinator').slice(0, -program('coordinator').length)];
  expect(flags[1]).toHaveLength(2);
  for (const some of flags) {
    const asked = spawnSync(process.execPath, [...some, '--input-type=module', '--eval', ask], { encoding: 'utf8' });
    expect(asked.stdout, asked.stderr).toBe('true');
  }
});
