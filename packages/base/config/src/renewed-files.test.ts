/** Files under a file system that hangs: a FIFO, whose open(2) waits for somebody at its other end. */
import { execFileSync } from 'node:child_process';
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync } from 'node:fs';
import { stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it, onTestFinished, vi } from 'vitest';

// A queue of our own: files of other tests in this process may be looked at, too.
vi.resetModules();
const { RenewedFiles } = await import('./renewed-files.ts');

const readLimitMs = 5_000;
const dir = mkdtempSync(join(tmpdir(), 'kvtier-renewed-files-'));
afterAll(() => rmSync(dir, { recursive: true }));

function opened(...names: string[]) {
  const paths = names.map((name) => join(dir, name));
  for (const path of paths) writeFileSync(path, 'first');
  const problems: (string | undefined)[] = [];
  const files = new RenewedFiles({
    files: paths.map((path) => ({ path, isSecret: false })),
    make: (bytes) => bytes.join(' '),
    ...{ file: 'a file', content: 'a file', reloadMs: 86_400_000 },
    onProblem: (why) => problems.push(why?.replaceAll(dir, 'DIR')),
  });
  onTestFinished(() => files.close());
  return { paths, problems, files };
}

/** As if the server of its file system were gone. */
function hang(path: string): void {
  rmSync(path);
  execFileSync('mkfifo', [path]);
  onTestFinished(() => {
    // Whoever waits at it goes on, and nobody comes to wait any more.
    const other = openSync(path, 'r+');
    rmSync(path);
    closeSync(other);
  });
}

it('keep one thread, however often and however many are looked at, and come into use when they answer', async () => {
  const hanging = opened('cert', 'key');
  const sound = opened('sound');
  for (const path of hanging.paths) hang(path);
  writeFileSync(sound.paths[0]!, 'second');

  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  onTestFinished(() => void vi.useRealTimers());
  for (let look = 1; look <= 3; look++) {
    const looks = [hanging.files.reload(), sound.files.reload()];
    await vi.advanceTimersByTimeAsync(readLimitMs);
    await Promise.all(looks);
  }
  vi.useRealTimers();
  // libuv has four threads: with all of them at the FIFOs, this would never end.
  expect((await stat('/')).isDirectory()).toBe(true);
  const limit = 'renewed files: no answer within 5000 ms';
  expect([hanging.problems, sound.problems]).toEqual([
    [`DIR/cert: not read again (${limit}); the one before stays in use`],
    [`DIR/sound: not read again (${limit}: DIR/cert is still being read); the one before stays in use`],
  ]);

  const renewed = [hanging.files, sound.files].map(
    (files) =>
      new Promise((resolve) => {
        files.onRenewed = resolve;
      }),
  );
  for (const path of hanging.paths) await writeFile(path, 'second');
  expect(await Promise.all(renewed)).toEqual(['second second', 'second']);
  expect([hanging.problems.at(-1), sound.problems.at(-1)]).toEqual([undefined, undefined]);
  expect([hanging.files.isRefused, sound.files.isRefused]).toEqual([false, false]);
});

it('the one of several that cannot be read is named', async () => {
  const { paths, problems, files } = opened('one', 'two');
  rmSync(paths[1]!);
  await files.reload();
  expect(problems).toEqual([expect.stringMatching(/^DIR\/two: not read again \(ENOENT/)]);
});
