/**
 * What a GPU machine runs of libkvtier (checks/connector_gpu.py), here over the driver's stand-in and what the program needs of torch: that blocks come
 * back, and that each of what it looks at is noticed where it is not so.
 */
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));
const connector = fileURLToPath(new URL('../../../connector/python', import.meta.url));
const deadlineMs = 240_000; // a second of CPU; on a busy machine it may wait long for its turn

interface Line {
  readonly name?: string;
  readonly ratio?: number;
  readonly case?: string;
  readonly error?: string;
}

/** Two layers of blocks of 4 KiB. `before`: of Python, what is other than it should be. */
function run(before: string, torch = `${cuda}/checks/standin_torch:${connector}/tests:`) {
  const program = `import sys, connector_gpu as program, threading\n${before}\nsys.exit(program.main(["2", "8", "2", "16"]))`;
  const env = {
    ...process.env,
    PYTHONPATH: `${torch}${cuda}/checks:${connector}/src`,
    PYTHONDONTWRITEBYTECODE: '1',
  };
  const { status, stdout, stderr } = spawnSync('/usr/bin/python3', ['-c', program], {
    encoding: 'utf8',
    env,
    timeout: deadlineMs,
  });
  const lines = stdout.split('\n').filter((line) => line !== '');
  return { code: status, lines: lines.map((line) => JSON.parse(line) as Line), stdout, stderr };
}

it(
  'blocks come back with their bits, beside a captured graph too, and the verdicts read it',
  () => {
    const { code, lines, stdout, stderr } = run('');
    expect(stderr).toBe('');
    expect(lines.map(({ name }) => name)).toEqual([
      'connector: blocks that came back with the same bits, keys and values apart',
      'connector store 4 KiB x 8, keys and values apart',
      'connector load 4 KiB x 8, keys and values apart',
      'connector: blocks that came back with the same bits, beside a captured graph',
      'connector: blocks that came back with the same bits, keys and values together',
      'connector store 4 KiB x 8, keys and values together',
      'connector load 4 KiB x 8, keys and values together',
    ]);
    expect(code).toBe(0);
    const { stdout: said } = spawnSync('awk', ['-f', `${cuda}/verdicts.awk`], { input: stdout, encoding: 'utf8' });
    expect(said).toContain('met: blocks of another engine that come back with the same bits, 1, 3 of 3\n');
    expect(said).toMatch(/: stores and loads of another engine, of one pinned copy, 0\.8, \d of 4/);
  },
  deadlineMs,
);

it.each([
  ['what is not loaded', 'program.Kv.load = lambda *_: None', 'what was loaded is not what was stored'],
  [
    'a payload in another order',
    'program.Kv.payload = lambda kv, block: bytes(kv.layout.payload_bytes)',
    'block 0 lies in the arena in another order than in its tensors',
  ],
  [
    'an arena that the system does not pin',
    'import torch; torch.DRIVER.refuse_pinning(801)',
    'GPU: pinning 69632 bytes of host memory',
  ],
  [
    'a thread that ends the capture of a graph',
    'import torch\nafter = program.Kv.load\ndef load(kv, *all):\n if threading.current_thread() is not threading.main_thread(): torch.DRIVER.current(); torch.DRIVER.allocate(64)\n after(kv, *all)\nprogram.Kv.load = load',
    '1 calls of other threads ended the capture',
  ],
])(
  '%s is the error of the case',
  (_, before, error) => {
    const { code, lines } = run(before);
    expect(lines.at(-1)).toMatchObject({ case: 'connector' });
    expect(lines.at(-1)!.error).toContain(error);
    expect(code).toBe(1);
  },
  deadlineMs,
);

it(
  'without torch it says so, and that is no failure',
  () => {
    const { code, lines, stderr } = run('sys.modules["torch"] = None', '');
    expect(lines).toEqual([]);
    expect(stderr).toBe("the connector's copies were not run: this python has no torch\n");
    expect(code).toBe(3);
  },
  deadlineMs,
);
