/** What a part of the system says to whoever operates it, as an argument: pino, or a list in tests. */

export interface Log {
  info(fields: object, message: string): void;
  warn(fields: object, message: string): void;
  error(fields: object, message: string): void;
}
