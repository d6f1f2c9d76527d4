/** What a session on a GPU machine wrote becomes a run of the history: its day, build and machine, and not those of where it is read. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, onTestFinished } from 'vitest';
import { page, type Run } from './record.ts';
import { recordSessions, sessionOf } from './session-record.ts';

const head = {
  at: '2026-11-30',
  commit: 'abc1234',
  machine: '16 x Some CPU, NVIDIA H200',
  stages: 'probe build checks speed system connector whole sanitize',
};
const figure = {
  name: 'export 2048 KiB x 256',
  value: 9.5,
  unit: 'us',
  limit: 9,
  limitName: 'one pinned copy',
  ratio: 0.9,
};
const session = (lines: readonly unknown[], of: object = head): string =>
  [{ session: of }, { device: 'NVIDIA H200', cublaslt: 'cuBLASLt 13' }, ...lines]
    .map((line) => (typeof line === 'string' ? line : JSON.stringify(line)))
    .join('\n');
const run = { at: '2026-11-30', commit: 'abc1234', machine: '16 x Some CPU, NVIDIA H200', suite: 'gpu-session' };

it('a whole session is a whole run, with the machine and the commit that it was measured on', () => {
  const { run: made, lacks } = sessionOf(session([figure, { case: 'transfer', ran: true }]), 'f');
  expect(made).toEqual({ ...run, isWhole: true, figures: [figure] });
  expect(lacks).toEqual([]);
  expect(page([made]).split('\n')).toContain(
    '| gpu-session | export 2048 KiB x 256 | 9.50 | 9.00 | us | 0.900 | one pinned copy | 2026-11-30, abc1234 |',
  );
});

it('what failed, was left out, was cut off or compares nothing is told, and the run is no whole one', () => {
  const { run: made, lacks } = sessionOf(
    session([
      figure,
      { case: 'model_8b', error: 'did not end within 90 s, and was killed' },
      { case: 'gemm', leftOut: 'it usually takes 20 s, 5 s were left' },
      '{"name":"half',
      { ...figure, name: 'no limit', ratio: null },
    ]),
    'f',
  );
  expect(made).toEqual({ ...run, figures: [figure] });
  expect(lacks).toEqual([
    'FAILED model_8b: did not end within 90 s, and was killed',
    'left out gemm: it usually takes 20 s, 5 s were left',
    'no figure: {"name":"half',
    'no comparison: no limit',
  ]);
});

it('a session of some stages says which, and is no whole run', () => {
  const { run: made } = sessionOf(session([figure], { ...head, stages: 'speed whole' }), 'f');
  expect(made).toEqual({ ...run, args: ['speed', 'whole'], figures: [figure] });
});

it.each([
  [session([]), 'f has no figures'],
  [
    JSON.stringify(figure),
    'f does not say of which build and machine it is; it was written by an older gpu-session.sh',
  ],
  [
    session([figure], { ...head, at: 'today' }),
    'f does not say of which build and machine it is; it was written by an older gpu-session.sh',
  ],
  [`${session([figure])}\n${session([figure])}`, 'f has two sessions; name their files one by one'],
])('%#: what cannot be recorded is refused, in one line', (text, why) => {
  expect(() => sessionOf(text, 'f')).toThrow(
    expect.objectContaining({ code: 'CONFIG', message: expect.stringContaining(why) }),
  );
});

it('files are recorded in their order, and a session only once', () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-session-record-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const [one, other] = [join(folder, 'one.jsonl'), join(folder, 'other.jsonl')];
  writeFileSync(one, session([figure]));
  writeFileSync(other, session([{ ...figure, value: 10 }]));
  const history: Run[] = [];
  const keep = { readHistory: () => history, record: (made: Run) => void history.push(made) };
  expect(recordSessions([one, other], keep)).toEqual([`${one}: 1 figures`, `${other}: 1 figures`]);
  expect(history.map(({ figures }) => figures[0]!.value)).toEqual([9.5, 10]);
  expect(() => recordSessions([one], keep)).toThrow(`${one} is recorded already`);
  expect(() => recordSessions([], keep)).toThrow('name the figures.jsonl of a session');
  expect(() => recordSessions([join(folder, 'none.jsonl')], keep)).toThrow('none.jsonl cannot be read (ENOENT)');
  expect(history).toHaveLength(2);
});

it('the stages that make a session whole are those of the script', () => {
  const script = readFileSync(new URL('../packages/engine/cuda/gpu-session.sh', import.meta.url), 'utf8');
  expect(/^known="(.*)"$/m.exec(script)?.[1]).toBe(head.stages);
  expect(sessionOf(session([figure]), 'f').run.isWhole).toBe(true);
});
