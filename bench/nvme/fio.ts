/**
 * fio as the limit of a disk tier: what it reaches on the tier's own segment files, and what that costs. The same files, because
 * where a file lies on a virtual disk changes its rate by half. It leaves the first page of each alone: the tier then keeps
 * its files (without anything in them), so that every round is one of overwriting.
 */
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { KvError } from '@kvtier/errors';

const run = promisify(execFile);

export interface Rate {
  /** GB/s. */
  readonly rate: number;
  /** CPU seconds per GB. */
  readonly cpu: number;
}

interface Report {
  readonly jobs: readonly {
    readonly read: { bw_bytes: number; io_bytes: number };
    readonly write: { bw_bytes: number; io_bytes: number };
    readonly usr_cpu: number;
    readonly sys_cpu: number;
    readonly job_runtime: number;
  }[];
}

/** Sequential I/O of `ioBytes` for `ms` by so many jobs of depth 32 (less for huge I/O), each with its share of the files. KvError SETUP without fio. */
export async function fio(
  files: readonly string[],
  kind: 'read' | 'write',
  ioBytes: number,
  jobs: number,
  ms: number,
): Promise<Rate> {
  const perJob = Math.ceil(files.length / jobs);
  const shares = Array.from({ length: jobs }, (_, job) => files.slice(job * perJob, (job + 1) * perJob));
  // 256 MiB in flight saturate any device; more buffers only make fio's start slow.
  const depth = Math.max(4, Math.min(32, Math.floor((256 << 20) / ioBytes)));
  const args = [
    ...[
      `--rw=${kind}`,
      `--bs=${ioBytes}`,
      '--direct=1',
      '--ioengine=io_uring',
      `--iodepth=${depth}`,
      '--group_reporting',
    ],
    ...['--time_based', `--runtime=${ms}ms`, '--output-format=json', '--overwrite=1', '--fallocate=none'],
    ...['--file_service_type=sequential', '--thread', '--offset=4096', '--registerfiles=1'],
  ];
  const stdout = await reported(
    args,
    shares.flatMap((share, job) => [`--name=job${job}`, `--filename=${share.join(':')}`]),
  );
  const [job] = (JSON.parse(stdout) as Report).jobs;
  const { bw_bytes: bytesPerSecond, io_bytes: bytes } = job![kind];
  // Percent of the jobs' time, summed over them.
  const cpuSeconds = ((job!.usr_cpu + job!.sys_cpu) / 100) * (job!.job_runtime / 1000);
  return { rate: bytesPerSecond / 1e9, cpu: cpuSeconds / (bytes / 1e9) };
}

/** Whether memory cannot be registered here, as the kernel would know it beforehand: then the tier does without, too. */
let isUnregistered = false;

/** @throws KvError SETUP: it does not run */
async function reported(args: readonly string[], jobs: readonly string[]): Promise<string> {
  const asked = (more: readonly string[]) => run('fio', [...args, ...more, ...jobs]);
  if (!isUnregistered) {
    const found = await asked(['--fixedbufs=1']).catch(() => undefined);
    if (found !== undefined) return found.stdout;
  }
  const { stdout } = await asked([]).catch((error: Error) => {
    const why = error.message.trim().split('\n').at(-1);
    throw new KvError(
      'SETUP',
      `fio: does not run here (${why}); apt-get install fio, or let it lock memory: ulimit -l`,
    );
  });
  if (!isUnregistered) console.error('fio cannot register its memory here (ulimit -l): it does without');
  isUnregistered = true;
  return stdout;
}
