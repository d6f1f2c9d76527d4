/** How workers beyond loopback are reached, and which are not. */
import { workerRecordSchema } from '@kvtier/config';
import { expect, it } from 'vitest';
import { KvtierLink } from './kvtier-link.ts';
import { type Access, type LinkHost, linkTimes } from './link.ts';
import { openLink } from './open-link.ts';
import { OpenaiLink } from './openai-link.ts';

const host = {} as LinkHost; // of lines that are not started
const open = (kind: string, address: string, access: Access | undefined) => {
  const record = workerRecordSchema.parse({ name: 'w', kind, address });
  return openLink({ record, host, sender: 's', times: linkTimes, media: [], access });
};
const pem = Buffer.from('x');
const trusted: Access = { trustedNetwork: true };

it.each<[string, string, Access | undefined]>([
  ['http:', 'http://10.1.2.3:8000', trusted],
  ['http: with a token', 'http://10.1.2.3:8000', { ...trusted, token: 't' }],
  ['https: without a token', 'https://10.1.2.3:8000', trusted],
  ['https: with a token', 'https://10.1.2.3:8000', { token: 't' }],
  ['loopback', 'http://127.0.0.1:8000', undefined],
])('an openai worker by %s', async (_, address, access) => {
  const link = open('openai', address, access);
  expect(link).toBeInstanceOf(OpenaiLink);
  await link.close();
});

it.each<[string, string, Access | undefined, string]>([
  ['openai', 'http://10.1.2.3:8000', undefined, 'or say "access": {"trustedNetwork": true}'],
  ['openai', 'http://10.1.2.3:8000', { token: 't', trustedNetwork: false }, 'use https and configure tokenFile'],
  ['openai', 'https://10.1.2.3:8000', {}, 'use https and configure tokenFile'],
  ['openai', '10.1.2.3:8000', trusted, 'give http://HOST:PORT'],
  ['kvtier', '10.1.2.3:8000', trusted, 'configure caFile, certFile and keyFile'],
])('%s at %s with %j is refused', (kind, address, access, why) =>
  expect(() => open(kind, address, access)).toThrow(
    expect.objectContaining({ code: 'CONFIG', message: expect.stringContaining(why) }),
  ),
);

it('our own workers only by certificates, whatever network is trusted', async () => {
  const link = open('kvtier', '127.0.0.1:1', trusted);
  expect(link).toBeInstanceOf(KvtierLink);
  await link.close();
  expect(() => open('kvtier', '10.1.2.3:1', { ...trusted, ca: pem, cert: pem })).toThrow(/certificate of ours/);
});
