/** A model as those see it who work on texts for it. */
import type { OtherName } from '@kvtier/registry';
import type { BlockNames } from './prompt-keys.ts';

/** What has to be known of a model. */
export interface TextModel {
  /** Its name to clients. */
  readonly name: string;
  /** Empty: nobody says where its tokenizer is; its bodies are passed on. */
  readonly modelDir: string;
  /** What `textDigestOf` is to say of the files there; undefined: nobody says. */
  readonly textDigest?: string | undefined;
  readonly maxModelTokens: number;
  readonly vocabSize: number;
  /** undefined: nobody says how its blocks are named. */
  readonly blocks: BlockNames | undefined;
  /** What else it is called by those workers, each of them by some. */
  readonly otherNames?: readonly OtherName[];
  /** Its workers take OpenAI's bodies as they came. */
  readonly isPassedOn: boolean;
  /** It has no worker now. */
  readonly hasLeft?: boolean;
}
