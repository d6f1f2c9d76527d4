/** What `--model` may say: "demo", "random:25m", "random:gemma3-30m", "random:8b", or a folder. */
import { stat } from 'node:fs/promises';
import { basename, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { cacheDir } from './cache-dir.ts';
import { readModelFolder } from './model-folder.ts';
import { planModel } from './plan-model.ts';
import { makeRandomModel, makeRealModel, type RandomFamily } from './random-model.ts';
import { realShapes } from './real-shapes.ts';

const demoDir = fileURLToPath(new URL('../../../../models/demo/model', import.meta.url));
const maxRandomParameters = 20e9;

export interface ResolvedModel {
  readonly dir: string;
  /** What `GET /v1/models` shows. */
  readonly name: string;
}

/** `onProgress` reports what takes longer than a moment: a line, and the share done, 0..1. */
export async function resolveModel(
  spec: string,
  onProgress: (line: string, share: number) => void = () => {},
): Promise<ResolvedModel> {
  if (spec === 'demo') return { dir: demoDir, name: 'demo' };
  if (spec.startsWith('random:')) {
    const { family, parameters } = randomModel(spec);
    const name = `random-${spec.slice('random:'.length)}`;
    const dir = join(cacheDir(), 'models', name);
    const progress = (share: number) => onProgress(`making the model ${name}`, share);
    const real = realShapes[spec.slice('random:'.length)];
    if (real) await makeRealModel(dir, real, demoDir, progress);
    else await makeRandomModel(dir, parameters, demoDir, progress, family);
    return { dir, name };
  }
  return await folderOf(spec);
}

/** As `resolveModel`, without making anything: a folder's own words and the headers of its weights are read. @throws KvError CONFIG, MODEL */
export async function checkModel(spec: string): Promise<ResolvedModel> {
  if (spec.startsWith('random:')) {
    randomModel(spec);
    return { dir: '', name: spec };
  }
  const model = spec === 'demo' ? { dir: demoDir, name: 'demo' } : await folderOf(spec);
  await readModelFolder(model.dir, planModel);
  return model;
}

function randomModel(spec: string): { readonly family: RandomFamily; readonly parameters: number } {
  const match = /^random:(?:(gemma3|ministral|mistral-sw)-)?(\d+(?:\.\d+)?)([kmb])$/.exec(spec);
  const parameters = match ? Number(match[2]) * { k: 1e3, m: 1e6, b: 1e9 }[match[3] as 'k' | 'm' | 'b'] : Number.NaN;
  const family = (match?.[1] ?? 'llama') as RandomFamily;
  if (!(parameters >= 500e3 && parameters <= maxRandomParameters)) {
    throw new KvError(
      'CONFIG',
      `--model ${spec}: say random:SIZE or random:FAMILY-SIZE (gemma3, ministral, mistral-sw) with a size from 500k to 20b, such as random:25m; random:0.5b and random:8b have real shapes`,
    );
  }
  return { family, parameters };
}

async function folderOf(spec: string): Promise<ResolvedModel> {
  const dir = resolve(spec);
  const info = await stat(dir).catch(() => null);
  if (!info?.isDirectory()) {
    throw new KvError('MODEL', `--model ${spec}: no such folder; give a Hugging Face model folder, demo or random:25m`);
  }
  return { dir, name: basename(dir) };
}
