/** What the engine without the connector answers: found once a run, or once for all runs that share a folder. */
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { ModelKind, Run } from './engine.ts';
import type { VllmRig } from './rig.ts';

/** With KVTIER_VLLM_STATE, what parts of a test leave to the next one outlives the run, so that each may be a run of its own. */
const lasting = process.env.KVTIER_VLLM_STATE;

export class Kept {
  #folder: string | undefined;

  /** Made when it is first asked for. */
  get folder(): string {
    if (lasting !== undefined) mkdirSync(lasting, { recursive: true });
    this.#folder ??= lasting ?? mkdtempSync(join(tmpdir(), 'kvtier-vllm-kept-'));
    return this.#folder;
  }

  /** One answer for each prompt, of an engine that `rig` starts and ends. */
  async right(rig: VllmRig, model: ModelKind, prompts: readonly (readonly number[])[]): Promise<Run> {
    const file = join(this.folder, `right-${model}-${prompts.length}.json`);
    if (existsSync(file)) return JSON.parse(readFileSync(file, 'utf8')) as Run;
    const engine = await rig.engine({ model, socket: null });
    const run = await engine.generate(prompts);
    await engine.stop();
    writeFileSync(file, JSON.stringify(run));
    return run;
  }

  close(): void {
    if (lasting === undefined && this.#folder !== undefined) rmSync(this.#folder, { recursive: true, force: true });
  }
}
