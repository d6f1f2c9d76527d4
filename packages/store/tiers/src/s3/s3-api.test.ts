/** The api's waits, against credentials that never come. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { planS3 } from './options.ts';
import { S3Api } from './s3-api.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-credentials-'));
  writeFileSync(join(folder, 'config'), '[default]\ncredential_process = sleep 10\n');
  for (const name of ['AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_PROFILE']) vi.stubEnv(name, undefined);
  vi.stubEnv('AWS_CONFIG_FILE', join(folder, 'config'));
  vi.stubEnv('AWS_SHARED_CREDENTIALS_FILE', join(folder, 'none'));
});
afterEach(() => {
  vi.unstubAllEnvs();
  rmSync(folder, { recursive: true });
});

it.each([
  ['a read', (api: S3Api, deadlineMs: number) => api.get('x', null, 0, [Buffer.alloc(4)], deadlineMs)],
  ['a write', (api: S3Api, deadlineMs: number) => api.put('x', [Buffer.alloc(4)], null, deadlineMs)],
  ['a listing', (api: S3Api, deadlineMs: number) => api.list('', deadlineMs)],
])('%s ends in time when whoever has the credentials is silent, and the breaker hears of it', async (_, act) => {
  const failures: string[] = [];
  const api = await S3Api.open({
    plan: planS3({ bucket: 'b', bytes: 1 << 30, endpoint: 'http://127.0.0.1:9', idleLimitMs: 100 }),
    onTry: (failure) => void failures.push(failure?.code ?? 'well'),
    suspended: () => undefined,
  });
  const startMs = performance.now();
  const error = await act(api, startMs + 400).catch((thrown: unknown) => thrown as KvError);
  expect(error).toBeInstanceOf(KvError);
  expect(error).toMatchObject({ code: 'DEADLINE' });
  expect(performance.now() - startMs).toBeLessThan(2_000);
  expect(failures.length).toBeGreaterThan(0);
  expect(new Set(failures)).toEqual(new Set(['DEADLINE']));
  api.close();
});
