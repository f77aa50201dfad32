BEGIN TRANSACTION;
CREATE TABLE paceline_requests (
	"key" INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	model TEXT NOT NULL, 
	route TEXT NOT NULL, 
	endpoint TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	accept TEXT NOT NULL, 
	lossy BOOLEAN NOT NULL, 
	drafters JSON NOT NULL, 
	params JSON NOT NULL, 
	drafted_by_source JSON NOT NULL, 
	accepted_by_source JSON NOT NULL, 
	prompt_tokens BIGINT NOT NULL, 
	cached_tokens BIGINT NOT NULL, 
	output_tokens BIGINT NOT NULL, 
	passes BIGINT NOT NULL, 
	drafted BIGINT NOT NULL, 
	accepted BIGINT NOT NULL, 
	finish TEXT, 
	error TEXT, 
	queue_s DOUBLE NOT NULL, 
	first_token_s DOUBLE, 
	seconds DOUBLE NOT NULL, 
	prompt TEXT, 
	output TEXT, 
	messages JSON, 
	tools JSON, 
	prompt_ids JSON, 
	output_ids JSON, 
	PRIMARY KEY ("key"), 
	UNIQUE (id)
);
INSERT INTO "paceline_requests" VALUES(1,'r0',1800000000.0,'smollm2-135m','agents','/v1/chat/completions','t1','match',0,'["suffix","ngram"]','{"temperature":0.7,"seed":18446744073709551615}','{"suffix":30,"ngram":10}','{"suffix":16}',512,448,24,8,40,16,'stop',NULL,0.001,0.05,0.4,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE paceline_rounds (
	request_key INTEGER NOT NULL, 
	"index" BIGINT NOT NULL, 
	start BIGINT NOT NULL, 
	budget BIGINT NOT NULL, 
	drafted BIGINT NOT NULL, 
	accepted BIGINT NOT NULL, 
	committed BIGINT NOT NULL, 
	batch BIGINT NOT NULL, 
	rows BIGINT NOT NULL, 
	draft_us BIGINT NOT NULL, 
	target_us BIGINT NOT NULL, 
	sources JSON NOT NULL, 
	parents JSON, 
	path JSON, 
	draft_tokens JSON, 
	tokens JSON, 
	finish TEXT, 
	PRIMARY KEY (request_key, "index"), 
	FOREIGN KEY(request_key) REFERENCES paceline_requests ("key") ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "paceline_rounds" VALUES(1,0,512,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,1,515,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,2,518,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,3,521,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,4,524,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,5,527,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,6,530,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "paceline_rounds" VALUES(1,7,533,8,5,2,3,1,6,40,21000,'[["suffix",4],["ngram",1]]',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE paceline_schema_version (
	version INTEGER NOT NULL
);
INSERT INTO "paceline_schema_version" VALUES(1);
CREATE INDEX paceline_requests_created ON paceline_requests (created);
COMMIT;
