/** A file that was renewed and cannot be used is told of until a good one comes. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { cacheNodeSchema, parseConfig } from '@kvtier/config';
import { RenewedFiles } from '@kvtier/config/files';
import { refusedFiles, refusedRenewals, tellRenewed } from '@kvtier/telemetry';
import { processMetrics, Registry } from '@kvtier/telemetry/metrics';
import { expect, it, onTestFinished } from 'vitest';
import { optionsOf } from './options-of.ts';

it('is counted once, and is refused until a good one comes, each file by itself', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-renewed-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const lines: string[] = [];
  const write = (line: string): void => void lines.push(line);
  const onProblem = tellRenewed({ info: write, warn: write }, 'secrets');
  const open = (name: string) => {
    const path = join(folder, name);
    const put = (text: string): void => writeFileSync(path, text, { mode: 0o600 });
    put('good');
    const files = new RenewedFiles({
      files: [{ path, isSecret: true }],
      make: ([bytes]) => {
        if (!bytes!.toString().startsWith('good')) throw new Error(`is ${bytes!.toString()}`);
        return bytes!;
      },
      ...{ file: 'a file', content: 'a good file', reloadMs: 86_400_000, onProblem },
    });
    return { put, files };
  };
  const [one, two] = [open('one'), open('two')];
  const [now, ever] = [refusedFiles(), refusedRenewals()]; // of the process: another test may have had some
  const look = async (): Promise<[now: number, ever: number]> => {
    await Promise.all([one.files.reload(), two.files.reload()]);
    return [refusedFiles() - now, refusedRenewals() - ever];
  };
  expect(await look()).toEqual([0, 0]);
  one.put('bad');
  expect(await look()).toEqual([1, 1]);
  expect(await look()).toEqual([1, 1]);
  one.put('worse');
  two.put('bad');
  expect(await look()).toEqual([2, 3]);
  two.put('good again');
  expect(await look()).toEqual([1, 3]);
  expect(lines.filter((line) => line.endsWith('in use'))).toEqual([
    expect.stringMatching(/one: not read again \(is bad\)/),
    expect.stringMatching(/one: not read again \(is worse\)/),
    expect.stringMatching(/two: not read again \(is bad\)/),
    'secrets in use',
  ]);
  const registry = new Registry();
  processMetrics('engine', registry);
  expect((await registry.metrics()).split('\n')).toContain(`kvtier_engine_refused_files ${now + 1}`);
  const config = parseConfig(
    cacheNodeSchema,
    { socketPath: '/s/node.sock', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: null },
    '',
  );
  expect(optionsOf(config, undefined as never).gauges!()).toEqual({
    'renewals.refused': ever + 3,
    'renewals.refused_now': now + 1,
  });
  one.files.close();
  expect(refusedFiles()).toBe(now);
  two.files.close();
});
