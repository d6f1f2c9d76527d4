/**
 * What is checked before an S3 tier opens, each with one line that says how to mend it: the bucket answers, the credentials may
 * list, write and delete, conditional writes work, and every node divides the budget in the same way.
 */
import { KvError } from '@kvtier/errors';
import { packsBelow } from './discovery.ts';
import type { S3Plan } from './options.ts';
import type { S3Api } from './s3-api.ts';

export const settingsKey = 'v1/settings';
/** More nodes than this do not start within the same few requests, time after time. */
const maxLooks = 5;

export async function checkBucket(api: S3Api, plan: S3Plan, deadlineMs: number): Promise<void> {
  await api.list(settingsKey, deadlineMs);
  await agree(api, plan, deadlineMs);
  await api.delete(`${packsBelow}none`, deadlineMs);
}

/** What `work` of an opening brings; its failure as who starts the node is told of it. */
export async function orRefusal<T>(plan: S3Plan, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    throw refusal(KvError.from(error), plan);
  }
}

/** The settings object is made once, by a conditional write; who finds another one than its own does not start. */
async function agree(api: S3Api, plan: S3Plan, deadlineMs: number): Promise<void> {
  const ours = JSON.stringify({ version: 1, packBytes: plan.packBytes, packCount: plan.packCount });
  const place = `s3://${plan.bucket}/${plan.prefix}${settingsKey}`;
  const body = [Buffer.from(ours)];
  const first = await api.put(settingsKey, body, null, deadlineMs);
  if (first.outcome === 'stored') {
    const second = await api.put(settingsKey, body, null, deadlineMs);
    if (second.outcome !== 'other') {
      throw new KvError(
        'CONFIG',
        `s3: ${plan.url.origin} ignores If-None-Match, so that nodes could overwrite each other; use a server with conditional writes`,
      );
    }
  }
  const text = (await api.getSmall(settingsKey, null, deadlineMs))?.toString();
  if (text === undefined) throw new KvError('IO', `s3: ${place} was deleted just now`);
  if (text !== ours) {
    throw new KvError(
      'CONFIG',
      `s3: the nodes of ${place} share a budget of ${text.slice(0, 200)}, this one has ${ours}; configure the same bytes and packBytes, or stop all of them and delete that object`,
    );
  }
  if (api.hasVersions) {
    throw new KvError(
      'CONFIG',
      `s3: bucket ${plan.bucket} keeps old versions, so that what is deleted still takes space; take a bucket without versioning`,
    );
  }
  for (let look = 0; look < maxLooks; look++) if (await learn(api, body, deadlineMs)) return;
  throw new KvError('IO', `s3: ${place} does not stay as it is`);
}

/**
 * How this server takes conditions, by the settings object. False: another node, which does the same, came between, and what
 * was seen says nothing about the server.
 */
async function learn(api: S3Api, body: readonly Uint8Array[], deadlineMs: number): Promise<boolean> {
  const etag = (await api.list(settingsKey, deadlineMs)).find(({ key }) => key === settingsKey)?.etag;
  if (etag === undefined) return false;
  const isStill = async (): Promise<boolean> => (await api.getSmall(settingsKey, etag, deadlineMs)) !== undefined;
  api.quotedEtags = false;
  if (!(await isStill())) {
    api.quotedEtags = true;
    if (!(await isStill())) return false;
  }
  try {
    const same = await api.put(settingsKey, body, etag, deadlineMs);
    if (same.outcome === 'other' && !(await isStill())) return false;
    const wrong = await api.put(settingsKey, body, '0'.repeat(32), deadlineMs);
    api.canReplace = same.outcome === 'stored' && wrong.outcome === 'other';
  } catch {
    api.canReplace = false; // a server that refuses the header: packs are deleted before others take their place
  }
  return true;
}

function refusal(error: KvError, plan: S3Plan): KvError {
  if (error.code === 'CONFIG') return error;
  const what = error.message;
  const at = plan.url.origin;
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
  // May come later: packages/store/session tries again.
  return new KvError('IO', `s3: ${at} does not answer (${what}); correct the endpoint, or start that server`, {
    retry: true,
  });
}
