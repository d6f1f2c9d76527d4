/**
 * What a client shows its servers, and whom it trusts, as the files hold it now: they are looked at again while it lives. What is new serves
 * the next connection; what is of no use is told, and changes nothing.
 */
import type { ConnectionOptions as TlsOptions } from 'node:tls';
import { RenewedFiles } from '@kvtier/config/files';
import { pemFilesOf, pemsIn } from '@kvtier/config/pems';
import { KvError } from '@kvtier/errors';
import type { RedisLogin, RedisServers, ServerAddress } from './servers.ts';

const defaultReloadMs = 10_000;
/** A password with more is a file of something else. */
const maxPasswordBytes = 4_096;

export class RenewedLogin {
  readonly #password: RenewedFiles<string> | undefined;
  readonly #tls: RenewedFiles<TlsOptions> | undefined;
  readonly #make: () => RedisLogin;
  #login: RedisLogin;

  /** `onRenewed`: `login` is another one. KvError CONFIG: a file that cannot be used, TLS that is not spoken. */
  constructor(settings: RedisServers, first: ServerAddress, onRenewed: () => void) {
    const { reloadMs = defaultReloadMs, passwordFile, onProblem = () => {}, database, place = 'redis' } = settings;
    const common = { reloadMs, onProblem };
    if (passwordFile !== undefined)
      this.#password = new RenewedFiles({
        // All may read what Docker mounts as a secret (0444): in the container there is nobody else.
        files: [{ key: `${place}.passwordFile`, path: passwordFile, isSecret: false }],
        make: ([bytes]) => passwordIn(bytes!),
        file: 'a readable file',
        content: 'a file with the password',
        ...common,
      });
    if (!first.isTls && settings.tls !== undefined)
      throw new KvError('CONFIG', 'redis: tls is configured, but the servers begin with redis:; write rediss:');
    const { serverName } = settings.tls ?? {};
    const { caFile, certFile, keyFile } = settings.tls ?? {};
    const named = pemFilesOf(`${place}.tls`, { caFile, certFile, keyFile });
    if (named.length > 0)
      this.#tls = new RenewedFiles<TlsOptions>({
        files: named,
        make: (bytes) => pemsIn(named, bytes),
        file: 'a readable PEM file',
        content: 'an authority, a certificate and its key (PEM)',
        ...common,
      });
    this.#make = () => ({
      username: settings.username ?? first.username,
      password: settings.password ?? this.#password?.made ?? first.password,
      database,
      tls: first.isTls ? { ...this.#tls?.made, ...(serverName && { servername: serverName }) } : undefined,
      connectTimeoutMs: settings.timeLimitMs,
    });
    this.#login = this.#make();
    for (const files of [this.#password, this.#tls]) {
      if (files === undefined) continue;
      files.onRenewed = () => {
        this.#login = this.#make();
        onRenewed();
      };
    }
  }

  /** As it is now; another object whenever something of it is another. */
  get now(): RedisLogin {
    return this.#login;
  }

  close(): void {
    this.#password?.close();
    this.#tls?.close();
  }
}

function passwordIn(file: Buffer): string {
  const password = file.toString('utf8').trim();
  if (password === '' || file.length > maxPasswordBytes) throw new Error('holds no password');
  return password;
}
