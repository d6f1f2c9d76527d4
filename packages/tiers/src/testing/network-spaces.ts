/**
 * Two network namespaces with a veth pair between them, for tests that lose packets and narrow the way. Root only. Addresses:
 * 10.79.0.1 in `first`, 10.79.0.2 in `second`.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';

const run = (command: string, ...args: readonly string[]): void => {
  execFileSync(command, args, { stdio: ['ignore', 'ignore', 'pipe'] });
};

export class NetworkSpaces {
  readonly first = `kvt${process.pid}a`;
  readonly second = `kvt${process.pid}b`;

  /** Undefined where namespaces, nftables or the rights for them are not there; says so on stderr. */
  static open(): NetworkSpaces | undefined {
    const spaces = new NetworkSpaces();
    try {
      spaces.#make();
      return spaces;
    } catch (error) {
      process.stderr.write(
        `SKIPPED: packets lost between namespaces (needs root, ip and nft): ${(error as Error).message}\n`,
      );
      spaces.close();
      return undefined;
    }
  }

  #make(): void {
    run('ip', 'netns', 'add', this.first);
    run('ip', 'netns', 'add', this.second);
    run('ip', 'link', 'add', 'v1', 'netns', this.first, 'type', 'veth', 'peer', 'name', 'v2', 'netns', this.second);
    for (const [space, device, address] of [
      [this.first, 'v1', '10.79.0.1/24'],
      [this.second, 'v2', '10.79.0.2/24'],
    ] as const) {
      run('ip', '-n', space, 'addr', 'add', address, 'dev', device);
      run('ip', '-n', space, 'link', 'set', device, 'up');
      run('ip', '-n', space, 'link', 'set', 'lo', 'up');
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'table', 'inet', 'loss');
      const hook = '{ type filter hook input priority 0; }';
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'chain', 'inet', 'loss', 'input', hook);
    }
  }

  spawn(space: string, command: readonly string[]): ChildProcess {
    return spawn('ip', ['netns', 'exec', space, ...command], { stdio: ['pipe', 'pipe', 'inherit'] });
  }

  /** Of all packets, both ways; 0 to 100. */
  lose(percent: number): void {
    for (const space of [this.first, this.second]) {
      run('ip', 'netns', 'exec', space, 'nft', 'flush', 'chain', 'inet', 'loss', 'input');
      if (percent === 0) continue;
      const which = percent < 100 ? `numgen random mod 100 < ${percent} ` : '';
      const rule = `iifname != "lo" ${which}drop`;
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'rule', 'inet', 'loss', 'input', rule);
    }
  }

  close(): void {
    for (const space of [this.first, this.second]) {
      try {
        run('ip', 'netns', 'del', space);
      } catch {
        // it was never made
      }
    }
  }
}
