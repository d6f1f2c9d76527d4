/**
 * What a bucket's server is shown, and by which authorities it is known, as the files hold it now: they are looked at again while the tier
 * lives. What is new serves the next request or connection; what is of no use is told, and changes nothing.
 */
import { RenewedFiles } from '@kvtier/config/files';
import { pemFilesOf, pemsIn } from '@kvtier/config/pems';
import { KvError } from '@kvtier/errors';
import { credentialsIn, type S3Credentials } from './credentials.ts';

/** Of `S3Settings`. */
export interface S3SecretSettings {
  /** Absent: the SDK's chain (environment, shared files, container, instance). */
  readonly accessKeyId?: string | undefined;
  readonly secretAccessKey?: string | undefined;
  readonly secretAccessKeyFile?: string | undefined;
  readonly sessionToken?: string | undefined;
  /** All three of them, in the format of Amazon's shared credentials file, and of which of its profiles; default: `default`. */
  readonly credentialsFile?: string | undefined;
  readonly profile?: string | undefined;
  /** PEM of the authorities to trust instead of the system's. */
  readonly caFile?: string | undefined;
  /** How often the files are looked at for new ones. */
  readonly reloadMs?: number | undefined;
  /** Why the files that lie there are not in use (one line); undefined: they are. */
  readonly onProblem?: ((why: string | undefined) => void) | undefined;
}

const maxSecretBytes = 4_096;

export class S3Secrets {
  readonly #settings: S3SecretSettings;
  readonly #secret: RenewedFiles<string> | undefined;
  readonly #shared: RenewedFiles<S3Credentials> | undefined;
  readonly #ca: RenewedFiles<string> | undefined;
  /** Told when the authorities are others. */
  onCa: (ca: string) => void = () => {};

  /** KvError CONFIG: a file that cannot be used, half of a pair. */
  constructor(settings: S3SecretSettings) {
    const { accessKeyId, secretAccessKey, secretAccessKeyFile, caFile, reloadMs = 10_000 } = settings;
    this.#settings = settings;
    if ((accessKeyId === undefined) !== ((secretAccessKeyFile ?? secretAccessKey) === undefined))
      throw new KvError('CONFIG', 's3: accessKeyId and secretAccessKey belong together; give both or neither');
    const common = { reloadMs, onProblem: settings.onProblem ?? (() => {}) };
    if (secretAccessKeyFile !== undefined)
      this.#secret = new RenewedFiles({
        // All may read what Docker mounts as a secret (0444): in the container there is nobody else.
        files: [{ key: 's3.secretAccessKeyFile', path: secretAccessKeyFile, isSecret: false }],
        make: ([bytes]) => secretIn(bytes!),
        file: 'a readable file',
        content: 'a file with the secret key in one line',
        ...common,
      });
    const { credentialsFile, profile = 'default' } = settings;
    if (credentialsFile !== undefined)
      this.#shared = new RenewedFiles({
        // As the secret key's.
        files: [{ key: 's3.credentialsFile', path: credentialsFile, isSecret: false }],
        make: ([bytes]) => credentialsIn(bytes!, profile),
        file: 'a readable file',
        content: "credentials in the format of Amazon's shared file",
        ...common,
      });
    if (caFile !== undefined) {
      const files = pemFilesOf('s3', { caFile });
      this.#ca = new RenewedFiles({
        files,
        make: (bytes) => pemsIn(files, bytes).ca!.toString('utf8'),
        file: 'a readable PEM file',
        content: 'authorities (PEM)',
        ...common,
      });
      this.#ca.onRenewed = (ca) => this.onCa(ca);
    }
  }

  /** undefined: the SDK's chain has them. */
  get credentials(): S3Credentials | undefined {
    if (this.#shared !== undefined) return this.#shared.made;
    const { accessKeyId, sessionToken } = this.#settings;
    const secretAccessKey = this.#secret?.made ?? this.#settings.secretAccessKey;
    if (accessKeyId === undefined || secretAccessKey === undefined) return undefined;
    return { accessKeyId, secretAccessKey, ...(sessionToken === undefined ? {} : { sessionToken }) };
  }

  /** PEM; undefined: the system's. */
  get ca(): string | undefined {
    return this.#ca?.made;
  }

  close(): void {
    this.#secret?.close();
    this.#shared?.close();
    this.#ca?.close();
  }
}

function secretIn(file: Buffer): string {
  const secret = file.toString('utf8').trim();
  if (file.length > maxSecretBytes || !/^[\x21-\x7e]+$/.test(secret)) throw new Error('holds no secret key');
  return secret;
}
