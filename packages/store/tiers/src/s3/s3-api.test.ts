/** The api's waits, against credentials that never come; and answers that say 200 and are none. */
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
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
  expect(performance.now() - startMs).toBeLessThan(9_000); // the credentials would take ten seconds
  expect(failures.length).toBeGreaterThan(0);
  expect(new Set(failures)).toEqual(new Set(['DEADLINE']));
  api.close();
});

const error = '<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We failed</Message></Error>';
const none = '<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>';

/** `limitMs`: what is answered wrongly is asked for again until then. */
async function answering(
  body: string,
  act: (api: S3Api, deadlineMs: number) => Promise<void>,
  limitMs = 400,
): Promise<void> {
  vi.stubEnv('AWS_ACCESS_KEY_ID', 'a');
  vi.stubEnv('AWS_SECRET_ACCESS_KEY', 'b');
  const server: Server = createServer((request, response) => {
    request.resume().on('end', () => response.end(body));
  });
  await once(server.listen(0, '127.0.0.1'), 'listening');
  const endpoint = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const plan = planS3({ bucket: 'b', bytes: 1 << 30, endpoint });
  const api = await S3Api.open({ plan, onTry: () => {}, suspended: () => undefined });
  try {
    await act(api, performance.now() + limitMs);
  } finally {
    api.close();
    server.closeAllConnections();
    server.close();
  }
}

it('an empty listing is one; a 200 with an error or a page in it is no listing, and nothing is gone by it', async () => {
  await answering(none, async (api, deadlineMs) => expect(await api.list('', deadlineMs)).toEqual([]), 10_000);
  for (const body of [error, '<html><body>Sign in</body></html>', '', 'OK']) {
    await answering(body, async (api, deadlineMs) => {
      await expect(api.list('', deadlineMs)).rejects.toBeInstanceOf(KvError);
    });
  }
});

it('a listing that is cut off is none: what it does not name is not gone', async () => {
  const cut = none.replace('>false<', '>true<');
  await answering(
    cut,
    async (api, deadlineMs) => {
      await expect(api.list('', deadlineMs)).rejects.toMatchObject({ code: 'PROTOCOL' });
    },
    3_000,
  );
});

it('a write whose 200 does not say what it has stored is looked for', async () => {
  await answering(error, async (api, deadlineMs) => {
    expect(await api.put('x', [Buffer.from('x')], null, deadlineMs)).toEqual({
      outcome: 'other',
      etag: '',
      unsure: true,
    });
  });
});
