/**
 * What fits onto a machine that takes a checkout along with the archive (docs/gpu.md): the checkout's files and the archive share one limit, so that
 * each file which is added to the checkout leaves less for the archive. Counted is what git does not ignore, as it lies there.
 */
import { execFileSync } from 'node:child_process';
import { lstatSync } from 'node:fs';
import { join } from 'node:path';
import { root } from './command.mjs';

const MiB = 1024 * 1024;
export const travellingBytes = 64 * MiB;
/** Files that come to the checkout after the archive was made. */
const spareBytes = MiB;
/** However small the checkout is: the archive is sent again with each run. */
const mostArchiveBytes = 45 * MiB;

export function checkoutBytes(folder = root) {
  const listed = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], {
    cwd: folder,
    encoding: 'utf8',
    maxBuffer: 64 * MiB,
  });
  const files = new Set(listed.split('\0').filter((file) => file !== ''));
  return [...files].reduce(
    (sum, file) => sum + (lstatSync(join(folder, file), { throwIfNoEntry: false })?.size ?? 0),
    0,
  );
}

/** What the archive may have beside so many bytes of a checkout. */
export const archiveBytesBeside = (bytes) => Math.min(mostArchiveBytes, travellingBytes - bytes - spareBytes);

/** '' where an archive fits, else the line that says by how much it does not. */
export function misfit(archive, archiveBytes, bytesOfCheckout) {
  const most = archiveBytesBeside(bytesOfCheckout);
  if (archiveBytes <= most) return '';
  const mib = (bytes) => (bytes / MiB).toFixed(2);
  return `${archive}: ${mib(archiveBytes)} MiB; at most ${mib(most)} MiB beside a checkout of ${mib(bytesOfCheckout)} MiB fit onto a GPU machine; pack less, or keep large files out of the checkout`;
}
