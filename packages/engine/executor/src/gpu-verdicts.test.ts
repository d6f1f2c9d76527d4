/** What is asked of a session's figures (verdicts.awk): met, short by how much, incomplete, or not measured. Names of figures: gpu-figures.long.test.ts. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, expect, it } from 'vitest';

const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));

let out = '';
beforeAll(() => {
  out = mkdtempSync(join(tmpdir(), 'kvtier-gpu-verdicts-'));
});
afterAll(() => rmSync(out, { recursive: true }));

const figure = (name: string, ratio: number): string =>
  JSON.stringify({ name, value: 1, unit: 'us', limit: 1, limitName: 'of "all"', ratio });
const failed = (name: string, error: string): string => JSON.stringify({ case: name, error });
const leftOut = (name: string, why: string): string => JSON.stringify({ case: name, leftOut: why });

function verdictsOf(lines: readonly string[]): { code: number | null; said: string[] } {
  const run = spawnSync('awk', ['-f', join(cuda, 'verdicts.awk')], { input: lines.join('\n'), encoding: 'utf8' });
  return { code: run.status, said: run.stdout.trim().split('\n') };
}

const moves = ['export', 'import', 'import by layer'];
const sizes = ['2048 KiB x 256', '64 KiB x 4096', '16 KiB x 8192'];
const whole = 'through the system: cuda random:8b 10000 8192';

it('what is asked is met, short, partly measured or not measured', () => {
  const { code, said } = verdictsOf([
    ...sizes.flatMap((size) => moves.map((move) => figure(`${move} ${size}`, size === sizes[2] ? 0.71 : 0.9))),
    ...['export', 'import'].map((move) => figure(`${move} while decoding 2048 KiB x 256`, 0.86)),
    figure('export of small blocks while decoding 64 KiB x 4096', 0.1),
    figure('exports beside 8B decode 624 blocks of 2048 KiB', 0.9),
    figure('imports beside 8B decode 624 blocks of 2048 KiB', 0.849),
    ...sizes.flatMap((size) => moves.slice(0, 2).map((move) => figure(`decode load beside ${move}s ${size}`, 0.98))),
    leftOut('system_beside_decode', 'it usually takes 35 s, 20 s were left'),
    ...['', ' by layer', ' by layer, in no order'].map((how) =>
      figure(`warm from the arena${how} 8B, 10000 tokens, steps of 8192`, 9.2),
    ),
    figure('ttft_arena_10000_8b_steps_8192', 9.1),
    figure('ttft_arena_10000_8b_steps_512', 9.3),
    ...[2048, 8192].map((tokens) => figure(`8B prefill bf16 ${tokens} tokens`, 0.61)),
    ...[1, 8, 32].map((batch) => figure(`8B decode bf16 batch ${batch}, 2048 tokens each`, batch === 8 ? 0.1 : 0.8)),
    figure('8B decode bf16 batch 1, 2048 tokens each, dependent launches', 0.2),
    ...['keys and values apart', 'beside a captured graph', 'keys and values together'].map((how) =>
      figure(`connector: blocks that came back with the same bits, ${how}`, 1),
    ),
    ...['store', 'load'].flatMap((move) =>
      ['apart', 'together'].map((how) =>
        figure(
          `connector ${move} 2048 KiB x 256, keys and values ${how}`,
          move === 'load' && how === 'apart' ? 0.7 : 0.9,
        ),
      ),
    ),
    '{"name":"8B: prom',
  ]);
  expect(said).toEqual([
    'SHORT: exports and imports alone, of one pinned copy, 0.9, 6 of 9; export 16 KiB x 8192: 0.71; import 16 KiB x 8192: 0.71; import by layer 16 KiB x 8192: 0.71',
    'SHORT: the same beside decodes, 0.85, 3 of 4; imports beside 8B decode 624 blocks of 2048 KiB: 0.849',
    'partly measured: decodes beside them, of decodes alone, 0.97, 6 of 8; system_beside_decode: left out, it usually takes 35 s, 20 s were left',
    'met: a hit of the arena, of the same prompt computed, 9, 5 of 5',
    'met: prefill, of the rate of matrix products, 0.6, 2 of 2',
    "not measured: attention, of torch's flash attention, 0.6",
    "partly measured: decodes at batch 1 and 32, equal and unequal, of the memory's speed, 0.75, 2 of 3; model_8b_unequal: not run",
    'not measured: prompts that give the same warm as cold, 1',
    'met: blocks of another engine that come back with the same bits, 1, 3 of 3',
    'SHORT: stores and loads of another engine, of one pinned copy, 0.8, 3 of 4; connector load 2048 KiB x 256, keys and values apart: 0.7',
  ]);
  expect(code).toBe(0);
});

it('what failed before it gave all of its figures is incomplete, however well the others went', () => {
  const { code, said } = verdictsOf([
    figure('export 2048 KiB x 256', 0.99),
    failed('transfer', 'a block arrived wrong'),
    failed('model_8b', 'did not end within 90 s, and was killed'),
    figure('8B decode bf16 batch 32, one of 100000 tokens among 31 of 500', 0.796),
    failed('system_equal', '3 prompts with other "bits"'),
    failed('connector', 'a store: 1 of 256 blocks are bad'),
    figure('8B with equal bits: prompts with the same bits warm as cold', 1),
    ...['', ' by layer'].map((how) => figure(`warm from the arena${how} 8B, 10000 tokens, steps of 8192`, 9.2)),
    figure('ttft_arena_10000_8b_steps_8192', 9.1),
    failed(whole, 'write-down of all blocks to disk: not within 30 s'),
    failed("Attention beside torch's flash, bf16, 1 x 32 queries over 10000 tokens", 'no kernel'),
    failed("Attention beside torch's cuDNN, bf16, 1 x 32 queries over 10000 tokens", 'no kernel either'),
  ]);
  expect(said).toEqual([
    'INCOMPLETE: exports and imports alone, of one pinned copy, 0.9, 1 of 9; transfer: a block arrived wrong',
    'not measured: the same beside decodes, 0.85',
    'not measured: decodes beside them, of decodes alone, 0.97',
    `INCOMPLETE: a hit of the arena, of the same prompt computed, 9, 3 of 4; ${whole}: write-down of all blocks to disk: not within 30 s; system_8192: gave 2 of its 3 figures`,
    'INCOMPLETE: prefill, of the rate of matrix products, 0.6, 0 of 2; model_8b: did not end within 90 s, and was killed',
    "INCOMPLETE: attention, of torch's flash attention, 0.6, 0 of 12; Attention beside torch's flash, bf16, 1 x 32 queries over 10000 tokens: no kernel",
    "INCOMPLETE: decodes at batch 1 and 32, equal and unequal, of the memory's speed, 0.75, 1 of 3; model_8b: did not end within 90 s, and was killed",
    'INCOMPLETE: prompts that give the same warm as cold, 1, 1 of 3; system_equal: 3 prompts with other \\"bits\\"',
    'INCOMPLETE: blocks of another engine that come back with the same bits, 1, 0 of 3; connector: a store: 1 of 256 blocks are bad',
    'INCOMPLETE: stores and loads of another engine, of one pinned copy, 0.8, 0 of 4; connector: a store: 1 of 256 blocks are bad',
  ]);
  expect(code).toBe(1);
});

it('what ran to its end and gave none of its figures is incomplete: they may have another name now', () => {
  const ran = (name: string): string => JSON.stringify({ case: name, ran: true });
  const { code, said } = verdictsOf([
    ...['model_8b', 'model_8b_unequal', 'torch_attention', 'attention_tail', 'system_512'].map(ran),
    ...[1, 32].map((batch) => figure(`8B decode bf16 batch ${batch}, 2048 tokens each`, 0.8)),
    ...['', ' by layer', ' in no order'].map((how) => figure(`warm from the arena${how} 8B, steps of 8192`, 9.2)),
    figure('ttft_arena_10000_8b_steps_8192', 9.1),
  ]);
  expect(said.filter((line) => !line.startsWith('not measured'))).toEqual([
    'INCOMPLETE: a hit of the arena, of the same prompt computed, 9, 4 of 4; system_512: gave none of its figures',
    'INCOMPLETE: prefill, of the rate of matrix products, 0.6, 0 of 2; model_8b: gave none of its figures',
    "INCOMPLETE: attention, of torch's flash attention, 0.6, 0 of 12; torch_attention: gave none of its figures",
    "INCOMPLETE: decodes at batch 1 and 32, equal and unequal, of the memory's speed, 0.75, 2 of 3; model_8b_unequal: gave none of its figures",
  ]);
  expect(code).toBe(1);
});

/** What torch_attention.py needs of torch: calls that take no time, events two milliseconds apart. */
const standInTorch: Readonly<Record<string, string>> = {
  'torch/__init__.py': `
__version__, bfloat16, uint8 = "0", None, None
class cuda:
    is_available = staticmethod(lambda: True)
    class Event:
        def __init__(self, enable_timing): pass
        def record(self): pass
        def synchronize(self): pass
        def elapsed_time(self, other): return 2.0
class Tensor:
    def fill_(self, value): pass
def randn(*shape, **more): return Tensor()
def empty(*shape, **more): return Tensor()
`,
  'torch/nn/__init__.py': '',
  'torch/nn/functional.py': 'def scaled_dot_product_attention(*all, **more): pass\n',
  'torch/nn/attention/__init__.py': `
from contextlib import nullcontext
class SDPBackend: FLASH_ATTENTION = CUDNN_ATTENTION = 0
def sdpa_kernel(backend): return nullcontext()
`,
  'torch/nn/attention/bias.py': 'def causal_lower_right(*shape): pass\n',
};

it("the verdicts read what is said of torch's attention", () => {
  for (const [file, text] of Object.entries(standInTorch)) {
    mkdirSync(join(out, 'python', file, '..'), { recursive: true });
    writeFileSync(join(out, 'python', file), text);
  }
  const prompts = ['1 x 8192 queries over 0', '4 x 2048 queries over 0', '1 x 2048 queries over 30720'];
  const tails = [10_000, 30_000, 100_000].flatMap((over) =>
    [32, 128, 500].map((queries) => `1 x ${queries} queries over ${over}`),
  );
  const ours = [...prompts, ...tails].map((shape) => {
    const name = `Attention v2 bf16, ${shape} tokens`;
    return JSON.stringify({ name, value: 1000, unit: 'TFLOP/s', limit: 800, limitName: 'cuBLASLt', ratio: 1.25 });
  });
  const torch = spawnSync('python3', [join(cuda, 'checks/torch_attention.py')], {
    input: ours.join('\n'),
    encoding: 'utf8',
    env: { ...process.env, PYTHONPATH: join(out, 'python'), PYTHONDONTWRITEBYTECODE: '1' },
  });
  expect(torch.status, torch.stderr).toBe(0);
  expect(verdictsOf([torch.stdout]).said).toContain("met: attention, of torch's flash attention, 0.6, 12 of 12");
});
