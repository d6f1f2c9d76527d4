/** CURVE keys: those that ZeroMQ's manual prints; and the files that hold some. */
import { mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { curveKeyIn, curveKeysIn, curvePublicKey, isCurveKey, z85Decode } from './curve-keys.ts';
import { eventAccessSchema, readEventAccess } from './event-access.ts';
import { kvEventsSchema, readKvEventsCurve } from './kv-events.ts';

const server = {
  publicKey: 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7',
  secretKey: 'JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6',
};
const client = {
  publicKey: 'Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID',
  secretKey: 'D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs',
};
const folder = mkdtempSync(join(tmpdir(), 'kvtier-curve-'));
afterAll(() => rmSync(folder, { recursive: true }));
const write = (name: string, text: string): string => {
  const path = join(folder, name);
  writeFileSync(`${path}.new`, text, { mode: 0o600 });
  renameSync(`${path}.new`, path);
  return path;
};
const ignore = (): void => {};

it('the public key follows from the secret one', () => {
  for (const { publicKey, secretKey } of [server, client]) expect(curvePublicKey(secretKey)).toBe(publicKey);
  expect(z85Decode(server.publicKey).toString('hex')).toBe(
    '54fcba24e93249969316fb617c872bb0c1d1ff14800427c594cbfacf1bc2d652',
  );
  expect([server.publicKey, 'x'.repeat(39), `"${'x'.repeat(39)}`].map(isCurveKey)).toEqual([true, false, false]);
});

it('files hold keys, one a line, and remarks', () => {
  const sharp = `#${'0'.repeat(39)}`;
  const file = Buffer.from(`# of gateways\n${client.publicKey}\n\n ${sharp} \n# ${server.publicKey}\n`);
  expect(curveKeysIn(file, 2)).toEqual([client.publicKey, sharp]);
  expect(() => curveKeysIn(file, 1)).toThrow('holds 2 CURVE keys, not 1 to 1');
  expect(() => curveKeysIn(Buffer.from('# none\n'), 2)).toThrow('holds 0 CURVE keys, not 1 to 2');
  expect(() => curveKeyIn(Buffer.from(`${server.secretKey}x\n`))).toThrow('holds a line that is no CURVE key');
  expect(curveKeyIn(Buffer.from(`${server.secretKey}\n`))).toBe(server.secretKey);
});

it("a publisher's keys are those that its files hold now", async () => {
  const problems: (string | undefined)[] = [];
  const secretKeyFile = write('secret', `${server.secretKey}\n`);
  const allowedClientKeysFile = write('allowed', `${client.publicKey}\n`);
  const parse = (curve: object) => kvEventsSchema.parse({ endpoint: 'ipc:///x', curve: { secretKeyFile, ...curve } });
  const keys = readKvEventsCurve(parse({ allowedClientKeysFile, reloadMs: 5 }), (why) => problems.push(why))!;
  const held = () => [keys.secretKey, keys.allowedClientKeys];
  expect(held()).toEqual([server.secretKey, [client.publicKey]]);
  const renewed = new Promise<void>((resolve) => keys.onRenewed(resolve));
  write('allowed', `${client.publicKey}\n${server.publicKey}\n`);
  write('secret', client.secretKey);
  await renewed;
  await expect.poll(held).toEqual([client.secretKey, [client.publicKey, server.publicKey]]);
  write('secret', 'none');
  await expect
    .poll(() => problems)
    .toEqual([
      expect.stringMatching(
        /secret: not read again \(holds a line that is no CURVE key.*\); the one before stays in use$/,
      ),
    ]);
  expect(keys.secretKey).toBe(client.secretKey);

  const both = { allowedClientKeys: [client.publicKey], allowedClientKeysFile };
  expect(() => parse(both)).toThrow(/give it or allowedClientKeysFile, and not both/);
  expect(() => parse({})).toThrow(/give it or allowedClientKeysFile/);
});

it("a reader's keys, likewise; two of publishers while these change", async () => {
  const secretKeyFile = write('own', client.secretKey);
  const serverKeyFile = write('servers', server.publicKey);
  const access = (curve: object) => readEventAccess(eventAccessSchema.parse({ curve }), ignore).curve!;
  const held = ({ publicKey, secretKey, serverKeys }: ReturnType<typeof access>) => [publicKey, secretKey, serverKeys];
  expect(held(access({ publicKey: client.publicKey, secretKeyFile }))).toEqual([...Object.values(client), []]);
  const keys = access({ secretKeyFile, serverKeyFile, reloadMs: 5 });
  expect(held(keys)).toEqual([...Object.values(client), [server.publicKey]]);
  write('own', server.secretKey);
  write('servers', `${client.publicKey}\n${server.publicKey}\n`);
  await expect.poll(() => held(keys)).toEqual([...Object.values(server), [client.publicKey, server.publicKey]]);

  expect(() => access({ secretKeyFile, publicKey: client.publicKey })).toThrow(
    /^kvEvents\.curve\.secretKeyFile: \/.*own: is not the secret of publicKey, which may be left out; name a file with a secret CURVE key/,
  );
  expect(() => access({ secretKeyFile, serverKeyFile, serverKey: server.publicKey })).toThrow(/give serverKey or serv/);
});
