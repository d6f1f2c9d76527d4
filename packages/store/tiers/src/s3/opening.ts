/**
 * What is checked before an S3 tier opens, each with one line that says how to mend it: the bucket answers, the credentials may
 * list and read, and every node divides the budget in the same way. Then whether packs may be written: the credentials may write and
 * delete, there is room, and conditional writes work. What is held is read where they may not.
 *
 * Invariant: no pack is written before the settings were there with our numbers, and the server was seen to keep conditions.
 */
import { KvError } from '@kvtier/errors';
import { packsBelow } from './discovery.ts';
import type { S3Plan } from './options.ts';
import type { S3Api } from './s3-api.ts';

export const settingsKey = 'v1/settings';
const settingsVersion = 1;
/** More nodes than this do not start within the same few requests, time after time. */
const maxLooks = 5;

/**
 * undefined: packs may be read and written, or `isReadOnly`, and writing was not tried; KvError: why they are only read.
 * @throws KvError when not even that.
 */
export async function checkBucket(
  api: S3Api,
  plan: S3Plan,
  deadlineMs: number,
  isReadOnly: boolean,
): Promise<KvError | undefined> {
  const etag = await agree(api, plan, deadlineMs);
  if (isReadOnly) return undefined;
  try {
    await proveWrites(api, plan, etag, deadlineMs);
    return undefined;
  } catch (error) {
    const failure = KvError.from(error);
    if (failure.code === 'CONFIG') throw failure; // writes harm, or the others are of another mind
    return refusedWrites(failure.message, plan) ?? failure;
  }
}

/** The same again, before the first pack of a tier that was opened to be read. @throws KvError why it is not written yet */
export async function checkWrites(api: S3Api, plan: S3Plan, deadlineMs: number): Promise<void> {
  try {
    await proveWrites(api, plan, await agree(api, plan, deadlineMs), deadlineMs);
  } catch (error) {
    const failure = KvError.from(error);
    throw refusedWrites(failure.message, plan) ?? failure;
  }
}

/** What `work` of an opening brings; its failure as who starts the node is told of it. */
export async function orRefusal<T>(plan: S3Plan, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    throw refusal(KvError.from(error), plan);
  }
}

const placeOf = ({ bucket, prefix }: S3Plan): string => `s3://${bucket}/${prefix}`;
const settingsOf = ({ packBytes, packCount }: S3Plan): string =>
  JSON.stringify({ version: settingsVersion, packBytes, packCount });

/**
 * The settings object is made once, by a conditional write, and only where it is not listed: a bucket that takes no writes can be read.
 * Who finds another one than its own does not start. Returns its ETag.
 */
async function agree(api: S3Api, plan: S3Plan, deadlineMs: number): Promise<string> {
  const ours = settingsOf(plan);
  for (let look = 0; look < maxLooks; look++) {
    // Not by a GET: without the right to list the whole bucket, Amazon's answer for what is not there is 403.
    const etag = (await api.list(settingsKey, deadlineMs)).find(({ key }) => key === settingsKey)?.etag;
    if (etag === undefined) {
      await api.put(settingsKey, [Buffer.from(ours)], null, deadlineMs, false);
      continue;
    }
    const text = (await read(api, etag, deadlineMs))?.toString();
    if (text === undefined) continue;
    if (text !== ours) {
      const version = versionOf(text);
      if (version !== undefined && version !== settingsVersion) throw otherVersion(plan, version);
      throw new KvError(
        'CONFIG',
        `s3: the nodes of ${placeOf(plan)}${settingsKey} share a budget of ${text.slice(0, 200)}, this one has ${ours}; configure the same bytes and packBytes, or stop all of them and delete that object`,
      );
    }
    mustForget(api, plan);
    return etag;
  }
  throw unsteady(plan);
}

/** undefined: no settings of any version. */
function versionOf(text: string): number | undefined {
  try {
    const version = (JSON.parse(text) as { readonly version?: unknown } | null)?.version;
    return typeof version === 'number' ? version : undefined;
  } catch {
    return undefined;
  }
}

/** Nodes of that version use this place, or did before they were brought back: it may be this one's again. */
function otherVersion(plan: S3Plan, version: number): KvError {
  const line = `s3: ${placeOf(plan)}${settingsKey} is of version ${version}, of another version of kvtier; update back, choose another prefix, or stop all nodes and delete what is below it`;
  return new KvError('CONFIG', line, { retry: true, tier: 's3' });
}

/** The settings, if they are still these; and how this server takes the ETag of a condition, which is found out by them. */
async function read(api: S3Api, etag: string, deadlineMs: number): Promise<Buffer | undefined> {
  // Once known it is left as it is: packs are being read.
  if (api.quotedEtags !== undefined) return api.getSmall(settingsKey, etag, deadlineMs);
  for (const quoted of [false, true]) {
    api.quotedEtags = quoted;
    const body = await api.getSmall(settingsKey, etag, deadlineMs);
    if (body !== undefined) return body;
  }
  api.quotedEtags = undefined;
  return undefined;
}

/** `etag`: of the settings, as they were found. */
async function proveWrites(api: S3Api, plan: S3Plan, etag: string, deadlineMs: number): Promise<void> {
  let found = etag;
  for (let look = 0; look < maxLooks; look++) {
    if (await keepsConditions(api, plan, found, deadlineMs)) {
      await api.delete(`${packsBelow}none`, deadlineMs, true);
      return;
    }
    found = await agree(api, plan, deadlineMs);
  }
  throw unsteady(plan);
}

/**
 * Tried on the settings, and whether one request can replace an object. False: another node, which does the same, came between, and
 * what was seen says nothing about the server.
 */
async function keepsConditions(api: S3Api, plan: S3Plan, etag: string, deadlineMs: number): Promise<boolean> {
  const body = [Buffer.from(settingsOf(plan))];
  const put = async (replaced: string | null) =>
    (await api.put(settingsKey, body, replaced, deadlineMs, false)).outcome;
  if ((await put(null)) === 'stored') {
    if ((await put(null)) === 'other') return false; // they were deleted just now
    throw new KvError(
      'CONFIG',
      `s3: ${plan.url.origin} ignores If-None-Match, so that nodes could overwrite each other; use a server with conditional writes`,
    );
  }
  mustForget(api, plan);
  try {
    const same = await put(etag);
    if (same === 'other' && (await api.getSmall(settingsKey, etag, deadlineMs)) === undefined) return false;
    api.canReplace = same === 'stored' && (await put('0'.repeat(32))) === 'other';
  } catch (error) {
    // Some servers look for room last. Without it, or while it fails, nothing is known of the header, and packs would go for what is
    // not stored.
    const failure = KvError.from(error);
    if (failure.retry || isFull(failure.message)) throw failure;
    api.canReplace = false; // a server that refuses the header: packs are deleted before others take their place
  }
  return true;
}

function mustForget({ hasVersions }: S3Api, { bucket }: S3Plan): void {
  if (!hasVersions) return;
  throw new KvError(
    'CONFIG',
    `s3: bucket ${bucket} keeps old versions, so that what is deleted still takes space; take a bucket without versioning`,
  );
}

const unsteady = (plan: S3Plan): KvError =>
  new KvError('IO', `s3: ${placeOf(plan)}${settingsKey} does not stay as it is`, { retry: true });

/** Ceph's word, MinIO's (of a bucket's quota, with a 400, and of its disks), and what others say with the status for it. */
const isFull = (what: string): boolean => /QuotaExceeded|StorageFull|HTTP 507/.test(what);

/** A write that was refused, which says nothing of reads; undefined: it was something else. `orElse`: what else helps who may not write. */
function refusedWrites(what: string, plan: S3Plan, orElse = ''): KvError | undefined {
  // What was not tried has another request's failure in it.
  if (!/^s3: (PUT|DELETE) (?!.*: not tried: )/.test(what)) return undefined;
  const at = plan.url.origin;
  if (isFull(what)) {
    const line = `s3: ${at} has no room left for bucket ${plan.bucket} (${what}); raise its quota, or make room`;
    return new KvError('IO', line, { retry: true });
  }
  if (!/HTTP 40[135]/.test(what)) return undefined;
  const line = `s3: ${at} refuses writes to bucket ${plan.bucket} (${what}); allow PutObject and DeleteObject below ${placeOf(plan)}${orElse}`;
  return new KvError('IO', line, { retry: true });
}

function refusal(error: KvError, plan: S3Plan): KvError {
  if (error.code === 'CONFIG') return error;
  const what = error.message;
  const at = plan.url.origin;
  // The settings could not be made: who may not write waits for one who may.
  const refused = refusedWrites(what, plan, ', or start a node first that may write');
  if (refused !== undefined) return refused;
  if (/NoSuchBucket|LIST .*HTTP 404/.test(what)) {
    return new KvError('CONFIG', `s3: bucket ${plan.bucket} does not exist at ${at}; create it, or correct the name`);
  }
  // A server that has no conditional writes may say so instead of ignoring the header.
  if (/PUT .*HTTP 501/.test(what)) {
    return new KvError('CONFIG', `s3: ${at} takes no If-None-Match (${what}); use a server with conditional writes`);
  }
  // Credentials that somebody was asked for and did not bring are no wrong ones: a service of the machine may have them later.
  if (/CredentialsProviderError/.test(what)) return new KvError('IO', what, { retry: true });
  if (/HTTP 40[13]/.test(what)) {
    return new KvError('CONFIG', `s3: ${at} refuses the credentials for bucket ${plan.bucket} (${what}); correct them`);
  }
  if (/HTTP (30\d|400)/.test(what)) {
    return new KvError('CONFIG', `s3: ${at} refuses the request (${what}); correct region, bucket or pathStyle`);
  }
  // May come later: packages/store/node tries again.
  return new KvError('IO', `s3: ${at} does not answer (${what}); correct the endpoint, or start that server`, {
    retry: true,
  });
}
