/**
 * A small disk of our own that goes bad when it is told to: a file system on a loop device. What fails is the device itself, so
 * that errors come to the node the way of real ones: through the block layer and the file system. Root only.
 */
import { spawnSync } from 'node:child_process';
import { rmSync, truncateSync, writeFileSync } from 'node:fs';

const imageBytes = 96 << 20;
/** What the file system keeps of itself lies below. */
const headBytes = 4 << 20;

export class LoopDisk {
  readonly #image: string;
  readonly #mountPoint: string;
  readonly #device: string;

  /** Undefined, with the reason on the console, where loop devices or the right to mount are missing. */
  static mount(image: string, mountPoint: string, missed: string): LoopDisk | undefined {
    writeFileSync(image, '');
    truncateSync(image, imageBytes);
    try {
      run('mkfs.ext4', '-q', '-b', '4096', '-E', 'lazy_itable_init=0,nodiscard', '-O', '^has_journal', image);
      run('mount', '-o', 'loop,errors=continue', image, mountPoint);
      return new LoopDisk(image, mountPoint, run('losetup', '-n', '-O', 'NAME', '-j', image));
    } catch (error) {
      console.warn(`SKIPPED: ${missed}: ${(error as Error).message}; run as root with loop devices`);
      rmSync(image);
      return undefined;
    }
  }

  private constructor(image: string, mountPoint: string, device: string) {
    this.#image = image;
    this.#mountPoint = mountPoint;
    this.#device = device;
  }

  /** What was written reads as zeros, and no call fails. */
  forget(): void {
    truncateSync(this.#image, headBytes);
    truncateSync(this.#image, imageBytes);
  }

  /** Reads and writes end with EIO, all of them but for the file system's own. */
  breakDown(): void {
    truncateSync(this.#image, headBytes);
    run('losetup', '-c', this.#device);
  }

  /** It works again; what was on it is zeros. */
  repair(): void {
    truncateSync(this.#image, imageBytes);
    run('losetup', '-c', this.#device);
  }

  unmount(): void {
    run('umount', '-l', this.#mountPoint);
    rmSync(this.#image);
  }
}

function run(command: string, ...args: readonly string[]): string {
  const { status, error, stdout, stderr } = spawnSync(command, args, { encoding: 'utf8' });
  if (status !== 0) throw new Error(`${command}: ${error?.message ?? stderr.trim()}`);
  return stdout.trim();
}
