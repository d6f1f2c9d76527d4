/**
 * How a GPU machine's minutes are used: in what order, what is left out where time is short, and what is still there when it ends from outside.
 * The script runs as it is unpacked there, with programs and a clock that a test scripts: each case takes `caseSeconds`.
 */
import { spawn, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { sessionOf } from '../../../../bench/session-record.ts';

const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));
const caseSeconds = 20;
const deadlineMs = 240_000; // some seconds of CPU; on a busy machine it may wait long for its turn

/** What is asked of the figures, in the order of the verdicts. */
const asked = [
  ...['transfer', 'transfer_while_decoding', 'model_8b', 'model_8b_unequal', 'system_8192'],
  ...['whole cuda random:8b 10000 8192', 'system_beside_decode', 'connector'],
  ...['system_equal', 'system_equal_bits', 'attention_prefill', 'attention_tail', 'torch'],
];

let folder = '';
const at = (name: string): string => join(folder, name);
const lines = (name: string): string[] => readFileSync(at(name), 'utf8').trim().split('\n');

/** A case tells its name, prints what the test has put into `figures/NAME`, and does what stands in `does/NAME`. */
const stands: Readonly<Record<string, string>> = {
  'path/date': 'case $* in +%s) cat "$T/clock" ;; "-u +%F") echo 2026-11-30 ;; *) echo 00:00:00 ;; esac',
  'path/nvidia-smi': 'echo a GPU',
  'run-case': `
echo "$1" >> "$T/told"
[[ $1 = "check "* ]] || echo $(($(cat "$T/clock") + ${caseSeconds})) > "$T/clock"
[ ! -e "$T/figures/$1" ] || cat "$T/figures/$1"
[ ! -e "$T/does/$1" ] || . "$T/does/$1"`,
  'bin/kernel_bench': `
case $1 in
  --list) printf '%s\\n' transfer model_8b gemm ;;
  --probe) echo '{"device":"a GPU","cublaslt":"cuBLASLt 13"}' ;;
  --case) exec "$T/run-case" "$2" ;;
esac`,
  'bin/runtime_check': 'echo \'{"kernel":"runtime","case":"launch","ok":true}\'',
  'bin/kernel_check': `
[ "$1" != --list ] || { printf '%s\\n' norm rope; exit; }
echo "{\\"kernel\\":\\"$1\\",\\"case\\":\\"first\\",\\"ok\\":true}"
"$T/run-case" "check $1"`,
  'system/node': 'shift; echo "$KVTIER_BENCH_DIR $XDG_CACHE_HOME" >> "$T/folders"; exec "$T/run-case" "whole $*"',
  python: `
case $1 in
  -c) ;;
  *connector_gpu.py) [ ! -e "$T/lacks" ] || { cat "$T/lacks" >&2; exit 3; }; exec "$T/run-case" connector ;;
  *) exec "$T/run-case" torch ;;
esac`,
};

/** What cases give where a test says nothing else: all that the verdicts ask of them, and none short. */
const sizes = ['2048 KiB x 256', '64 KiB x 4096', '16 KiB x 8192'];
const each = (heads: readonly string[], tails: readonly string[]): string[] =>
  heads.flatMap((head) => tails.map((tail) => head + tail));
const gives: Readonly<Record<string, readonly string[]>> = {
  transfer: each(['export ', 'import ', 'import by layer '], sizes),
  transfer_while_decoding: [
    ...each(['export', 'import'], [' while decoding 2048 KiB x 256']),
    ...each(['decode load beside exports ', 'decode load beside imports '], sizes),
  ],
  system_beside_decode: each(['exports', 'imports'], [' beside 8B decode 4 blocks']).concat(
    each(['8B decode, batch 32, beside '], ['exports', 'imports']),
  ),
  system_8192: each(['warm from the arena'], ['', ' by layer', ' in no order']).map((name) => `${name} steps of 8192`),
  system_512: ['warm from the arena steps of 512'],
  'whole cuda random:8b 10000 8192': ['ttft_arena_10000_8b_steps_8192'],
  'whole cuda random:8b 10000 512': ['ttft_arena_10000_8b_steps_512'],
  model_8b: each(['8B prefill '], ['2048', '8192']).concat(
    each(['8B decode bf16 batch '], ['1, 2048 tokens each', '32, 2048 tokens each']),
  ),
  model_8b_unequal: ['8B decode bf16 batch 32, one of 100000'],
  torch: Array.from({ length: 12 }, (_, shape) => `Attention beside torch's flash, ${shape}`),
  system_equal: each(['8B: prompts with '], ['a tie', 'the same bits']),
  system_equal_bits: ['8B with equal bits: prompts with the same bits'],
  connector: each(['connector: blocks that came back '], ['1', '2', '3']).concat(
    each(['connector store ', 'connector load '], ['apart', 'together']),
  ),
};
const linesOf = (names: readonly string[]): string =>
  names.map((name) => `{"name":"${name}","value":1,"unit":"us","limit":1,"limitName":"x","ratio":10}\n`).join('');

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-gpu-minutes-'));
  for (const name of ['sources', 'figures', 'does', 'path', 'bin', 'system', 'out']) mkdirSync(at(name));
  for (const name of ['gpu-session.sh', 'verdicts.awk']) copyFileSync(join(cuda, name), at(name));
  for (const [name, text] of Object.entries(stands)) writeFileSync(at(name), `#!/bin/bash\n${text}\n`, { mode: 0o755 });
  for (const [name, figures] of Object.entries(gives)) writeFileSync(at(`figures/${name}`), linesOf(figures));
  writeFileSync(at('clock'), '1000000\n');
  writeFileSync(at('told'), '');
});
afterEach(() => rmSync(folder, { recursive: true }));

const settings = (): NodeJS.ProcessEnv => ({
  T: folder,
  HOME: folder,
  PATH: `${at('path')}:/usr/bin:/bin`,
  OUT: at('out'),
  KVTIER_TORCH_PYTHON: at('python'),
});

function session(args: readonly string[], env: NodeJS.ProcessEnv = {}): { code: number | null; said: string } {
  const ended = spawnSync(at('gpu-session.sh'), args, { encoding: 'utf8', env: { ...settings(), ...env } });
  return { code: ended.status, said: ended.stdout + ended.stderr };
}

/** The cases that ran, without the checks, which run beside some of them. */
const told = (): string[] => lines('told').filter((name) => !name.startsWith('check '));

it(
  'what asks how much of the GPU is free is over before anything runs beside the checks',
  () => {
    // Fails as it would on a GPU where somebody else takes or frees memory: it looks for that for a second.
    writeFileSync(
      at('bin/runtime_check'),
      `#!/bin/bash
"$T/run-case" 'check runtime'
for ((i = 0; i < 50; i++)); do
  ! grep -qxE 'check (norm|rope)|system_equal' "$T/told" || { echo '{"kernel":"Buffer","case":"is freed","ok":false}'; exit 1; }
  sleep 0.02
done
echo '{"kernel":"Buffer","case":"is freed","ok":true}'
`,
    );
    const { said } = session(['checks', 'system']);
    expect(said).toContain('checks: ok');
    const beside = lines('told').filter((name) => /^check|_equal$/.test(name));
    expect(beside[0]).toBe('check runtime');
    expect(beside.sort()).toEqual(['check norm', 'check rope', 'check runtime', 'system_equal']);
  },
  deadlineMs,
);

it(
  'where it takes all the time that is left, no other check begins, and it is told',
  () => {
    writeFileSync(at('bin/runtime_check'), '#!/bin/bash\necho 1000600 > "$T/clock"\nexit 124\n');
    const { code, said } = session(['--seconds', '500', 'checks', 'system']);
    expect(said).toContain(
      'checks: FAILED ({"kernel":"runtime_check","case":"ended with code 124","ok":false}), 560 s\n',
    );
    expect(lines('told')).toEqual(['system_8192', 'system_beside_decode']);
    expect(code).toBe(1);
  },
  deadlineMs,
);

it(
  'what is asked comes first, in its order; what no longer fits into the time is left out, with the reason',
  () => {
    const { code, said } = session(['--seconds', '345']);
    expect(told()).toEqual([...asked, 'system_512', 'model_8b_tails', 'system_disk', 'system_start']);
    expect(said).toContain(': left out: it usually takes 75 s, 60 s are left\n');
    expect(said.match(/asked: .*\n/g)!.filter((line) => !line.startsWith('asked: met: '))).toEqual([]);
    expect(said).toContain('met: exports and imports alone, of one pinned copy, 0.9, 9 of 9\n');
    expect(said).toContain('checks: ok');
    expect(lines('out/figures.jsonl').at(-1)).toMatch(
      /^\{"case":"gemm","leftOut":"it usually takes 20 s, \d+ s were left"\}$/,
    );
    expect(code).toBe(0);
  },
  deadlineMs,
);

it(
  'where no time is left for anything, that is what the verdicts say',
  () => {
    const { code, said } = session(['--seconds', '6', 'speed']);
    expect(told()).toEqual(['']);
    expect(said).toContain(
      'asked: not measured: exports and imports alone, of one pinned copy, 0.9; transfer: left out, it usually takes 15 s, 1 s were left\n',
    );
    expect(code).toBe(0);
  },
  deadlineMs,
);

it(
  'ended by SIGTERM it says what was measured until then, and of which checks',
  async () => {
    writeFileSync(at('does/system_equal'), 'exec sleep 1000');
    writeFileSync(at('does/check rope'), 'exec sleep 1000');
    const running = spawn(at('gpu-session.sh'), ['speed', 'checks', 'system'], { env: settings() });
    let said = '';
    running.stdout.on('data', (text: Buffer) => {
      said += text.toString();
    });
    const closed = once(running, 'close');
    await expect
      .poll(
        () =>
          [...lines('told'), existsSync(at('out/checks.jsonl')) && readFileSync(at('out/checks.jsonl'), 'utf8')].join(),
        { timeout: deadlineMs },
      )
      .toMatch(/system_equal.*"norm"/s);
    await expect.poll(() => lines('told'), { timeout: deadlineMs }).toContain('check rope');
    running.kill('SIGTERM');
    expect(await closed).toEqual([143, null]);
    expect(said).toContain('asked: met: exports and imports alone, of one pinned copy, 0.9, 9 of 9\n');
    expect(said).toContain(
      'asked: INCOMPLETE: prompts that give the same warm as cold, 1, 2 of 3; system_equal: was ended from outside; system_equal_bits: not run\n',
    );
    expect(lines('out/checks.jsonl').map((line) => (JSON.parse(line) as { kernel: string }).kernel)).toEqual([
      'runtime',
      'norm',
      'rope',
    ]);
    expect(readdirSync(folder)).not.toContain('scratch');
  },
  deadlineMs,
);

it(
  'what a case leaves unsaid, and figures of a session before, are no verdict',
  () => {
    expect(session(['speed']).code).toBe(0);
    rmSync(at('figures/transfer'));
    writeFileSync(at('does/transfer'), 'printf \'{"name":"half\'; exit 7');
    const { code, said } = session(['speed']);
    expect(said).toContain(
      'INCOMPLETE: exports and imports alone, of one pinned copy, 0.9, 0 of 9; transfer: ended with code 7\n',
    );
    expect(code).toBe(1);
    expect(lines('out/figures-1.jsonl').slice(1, 11).join('\n')).toBe(
      `${linesOf(gives.transfer!)}{"case":"transfer","ran":true}`,
    );
    expect(lines('out/figures.jsonl').slice(1, 3)).toEqual([
      '{"name":"half',
      '{"case":"transfer","error":"ended with code 7"}',
    ]);
  },
  deadlineMs,
);

it(
  'a case that ends well without a figure that is asked of it is incomplete, and not one that was not run',
  () => {
    writeFileSync(at('figures/model_8b_unequal'), linesOf(['8B decode by another name']));
    writeFileSync(at('figures/system_512'), '');
    writeFileSync(at('lacks'), 'this python has no torch\n');
    const { code, said } = session(['speed', 'system', 'connector']);
    expect(said).toContain(
      "INCOMPLETE: decodes at batch 1 and 32, equal and unequal, of the memory's speed, 0.75, 2 of 3; model_8b_unequal: gave none of its figures\n",
    );
    expect(said).toContain(
      'INCOMPLETE: a hit of the arena, of the same prompt computed, 9, 3 of 4; system_512: gave none of its figures; through the system',
    );
    expect(said).toContain(
      'not measured: stores and loads of another engine, of one pinned copy, 0.8; connector: left out, this python has no torch\n',
    );
    expect(lines('out/figures.jsonl')).toContain('{"case":"model_8b_unequal","ran":true}');
    expect(lines('out/figures.jsonl')).not.toContain('{"case":"connector","ran":true}');
    expect(code).toBe(1);
  },
  deadlineMs,
);

it(
  'figures begin with the day, the build and the machine that they are of, from which they are recorded',
  () => {
    writeFileSync(at('commit'), 'abc1234+\n');
    session(['speed', 'connector']);
    const { run } = sessionOf(readFileSync(at('out/figures.jsonl'), 'utf8'), 'figures.jsonl');
    expect([run.at, run.commit, run.suite, run.args, run.isWhole]).toEqual([
      ...['2026-11-30', 'abc1234+', 'gpu-session'],
      ['speed', 'connector'],
      undefined,
    ]);
    expect(run.machine).toBe(`${cpus().length} x ${cpus()[0]!.model.trim()}, a GPU`);
    expect(run.figures).toHaveLength(41);
  },
  deadlineMs,
);

it(
  'the disk that is measured lies outside of what is carried away, and a second session finds the cache of the first',
  () => {
    session(['whole']);
    session(['whole'], { KVTIER_BENCH_DIR: at('does'), KVTIER_BENCH_CACHE: at('bin') });
    const [first, , , fourth] = lines('folders').map((line) => line.split(' '));
    expect(first![0]).toMatch(`${at('scratch')}/kvtier-gpu-`);
    expect(first![1]).toBe(at('cache'));
    expect(fourth![0]).toMatch(`${at('does')}/kvtier-gpu-`);
    expect(fourth![1]).toBe(at('bin'));
    expect([existsSync(at('scratch')), readdirSync(at('does')), readdirSync(at('out'))]).toEqual([
      false,
      [],
      ['checks.jsonl', 'figures-1.jsonl', 'figures.jsonl', 'log.txt', 'summary.txt'],
    ]);
  },
  deadlineMs,
);

it(
  'a Python that lacks what the connector needs is told, and no failure',
  () => {
    writeFileSync(at('lacks'), "the connector's copies were not run: this python has no torch\n");
    const { code, said } = session(['connector']);
    expect(said).toContain("00:00:00 connector: the connector's copies were not run: this python has no torch\n");
    expect(said).toContain("connector: left out, the connector's copies were not run: this python has no torch\n");
    expect(code).toBe(0);
  },
  deadlineMs,
);

it(
  'what compute-sanitizer looks at is timed, too, under the same name',
  () => {
    const script = (name: string, text: string) => writeFileSync(at(name), `#!/bin/bash\n${text}\n`, { mode: 0o755 });
    script('path/compute-sanitizer', '');
    script('bin/kernel_bench', stands['bin/kernel_bench']!.replace('gemm', 'gemm rope'));
    session(['speed']);
    expect(told().filter((name) => name === 'rope')).toEqual(['rope']);
  },
  deadlineMs,
);

it(
  'a check that hangs costs nothing of the longest case that is asked',
  () => {
    writeFileSync(at('does/check rope'), 'echo $(($(cat "$T/clock") + 220)) > "$T/clock"');
    const { said } = session(['--seconds', '325']);
    expect(told()).toContain('whole cuda random:8b 10000 8192');
    expect(said).toContain('torch_attention: left out: it usually takes 40 s, 0 s are left\n');
  },
  deadlineMs,
);

it(
  'a GPU that has fallen off the bus, so that nvidia-smi hangs, is told, and costs seconds',
  () => {
    writeFileSync(at('path/nvidia-smi'), '#!/bin/bash\nexec sleep 1000\n');
    const { code, said } = session(['--seconds', '30', 'probe']);
    expect(said).toMatch(/session: probe, within 30 s; nvidia-smi does not answer\n/);
    expect(lines('out/log.txt')).toContain('nvidia-smi does not answer');
    expect(code).toBe(0);
  },
  deadlineMs,
);

/** A system whose process outlives its case until the session has waited for it (the session's `sleep` is what it waits by). */
const outlived = `
mkdir -p "$KVTIER_BENCH_DIR/kvtier-system-1/gpu-8b"
ln -s "5-$ID" "$KVTIER_BENCH_DIR/kvtier-system-1/gpu-8b/place.id"
touch "$T/alive" "/dev/shm/kvtier-$ID-00000001" "/dev/shm/kvtier-$ID-00000001.lock"
setsid "$BASH" -c 'echo > "$T/outlives"; for ((i = 0; i < 6000; i++)); do [ ! -s "$T/slept" ] || break; /usr/bin/sleep 0.02; done; rm "$T/alive"' > /dev/null 2>&1 &
until [ -e "$T/outlives" ]; do /usr/bin/sleep 0.01; done
exit 7`;

it(
  'after a case of the whole system that failed, the next one begins when its processes have ended; its arena goes',
  () => {
    const id = randomBytes(4).toString('hex');
    const arenas = (): string[] => readdirSync('/dev/shm').filter((name) => name.startsWith(`kvtier-${id}`));
    copyFileSync('/bin/bash', at('system/node')); // it runs what is given to it as a program
    mkdirSync(at('system/build/programs/bench'), { recursive: true });
    const script = `echo "whole $*" >> "$T/told"\n[[ $* != *8192 ]] || { ${outlived}\n}\n[ ! -e "$T/alive" ] || echo lives >> "$T/told"\n`;
    writeFileSync(at('system/build/programs/bench/gpu-system.mjs'), script);
    writeFileSync(at('path/sleep'), '#!/bin/bash\necho "$1" >> "$T/slept"\nexec /usr/bin/sleep "$1"\n', {
      mode: 0o755,
    });
    try {
      const { code, said } = session(['whole'], { ID: id });
      expect(said).toContain('through the system: cuda random:8b 10000 8192: FAILED');
      expect(told()).toEqual([
        'whole cuda random:8b 10000 8192',
        'whole cuda random:8b 10000 512',
        'whole cuda random:0.5b',
      ]);
      expect(arenas()).toEqual([]);
      expect(code).toBe(1);
    } finally {
      for (const name of arenas()) rmSync(join('/dev/shm', name));
    }
  },
  deadlineMs,
);
