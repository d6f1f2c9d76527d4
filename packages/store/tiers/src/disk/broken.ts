/**
 * What a device is out of service for, at a start, too: no node is kept from starting by a device that is broken. What somebody has to
 * mend in a configuration (a lock of another node, permissions) is none of it.
 */
import { KvError } from '@kvtier/errors';

/**
 * EIO, ENXIO, ENODEV, EROFS, EBADMSG (checksums of metadata), ENOTCONN (a server of FUSE), ESTALE, EUCLEAN: it is gone, or its file system is
 * damaged, shut down or read-only by now.
 */
const broken = new Set([5, 6, 19, 30, 74, 107, 116, 117]);

/** The device or its file system is broken: it answers, and cannot be used. */
export const isBroken = (error: unknown): boolean => broken.has((error as { errno?: number }).errno ?? 0);

/** The folder's disk is not where it was, or where it is said to be. */
export class NotMountedError extends KvError {
  constructor(dir: string, why: string) {
    super('IO', `${dir}: is not mounted: ${why}`);
  }
}

export const noFolderFor = (dir: string): NotMountedError =>
  new NotMountedError(dir, 'it is not there, nor a folder to make it in; mount its disk, or make the folder above it');
