CREATE FUNCTION servanda_ledger_refuse() RETURNS trigger
    LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'a ledger is append-only'; END $$;
CREATE TABLE servanda_ledger (
    seq bigint NOT NULL,
    run text NOT NULL,
    n bigint NOT NULL,
    at double precision NOT NULL,
    actor text NOT NULL,
    kind text NOT NULL,
    body text NOT NULL,
    prev text NOT NULL,
    hash text NOT NULL
);
CREATE TABLE servanda_ledger_meta (
    name text NOT NULL,
    value text NOT NULL
);
INSERT INTO servanda_ledger VALUES (1, 'a', 1, 1000, 'ci', 'begun', '{"n":1,"why":"first"}', '00000000000000000000000000000000', '4a051ea06d148161d2218d896e0f6a64');
INSERT INTO servanda_ledger VALUES (2, 'b', 1, 1001.5, 'ana', 'begun', '{"rows":[1,2.5,null]}', '4a051ea06d148161d2218d896e0f6a64', 'f80a96a8487f746dc936204b49e610ab');
INSERT INTO servanda_ledger VALUES (3, 'a', 2, 1002.25, 'ci', 'advanced', '{"e":1e-17,"why":"it holds"}', 'f80a96a8487f746dc936204b49e610ab', '1a3ea85ee5d242eef8a52097fc686c81');
INSERT INTO servanda_ledger_meta VALUES ('schema', '1');
INSERT INTO servanda_ledger_meta VALUES ('mark', 'c9e364bc3cfc368022aa5bdaa0648e37');
ALTER TABLE ONLY servanda_ledger_meta
    ADD CONSTRAINT servanda_ledger_meta_pkey PRIMARY KEY (name);
ALTER TABLE ONLY servanda_ledger
    ADD CONSTRAINT servanda_ledger_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY servanda_ledger
    ADD CONSTRAINT servanda_ledger_run_n_key UNIQUE (run, n);
CREATE TRIGGER servanda_ledger_kept BEFORE DELETE OR UPDATE OR TRUNCATE ON servanda_ledger FOR EACH STATEMENT EXECUTE FUNCTION servanda_ledger_refuse();
ALTER TABLE servanda_ledger ENABLE ALWAYS TRIGGER servanda_ledger_kept;
CREATE TRIGGER servanda_ledger_meta_kept BEFORE DELETE OR UPDATE OR TRUNCATE ON servanda_ledger_meta FOR EACH STATEMENT EXECUTE FUNCTION servanda_ledger_refuse();
ALTER TABLE servanda_ledger_meta ENABLE ALWAYS TRIGGER servanda_ledger_meta_kept;
