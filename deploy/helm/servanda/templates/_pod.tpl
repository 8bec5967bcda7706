{{- define "servanda.labels" -}}
app.kubernetes.io/name: servanda
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* of every pod */}}
{{- define "servanda.pod" -}}
automountServiceAccountToken: false
# the variables of services would begin as those of the program do
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: contract
    configMap: {name: {{ .Release.Name }}-contract}
  - name: keys
    secret: {secretName: {{ .Values.keys }}, defaultMode: 0440, items: [{key: keys.yaml, path: keys.yaml}]}
  - name: tmp
    emptyDir: {}
{{- with .Values.models }}
  - name: models
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* of every container */}}
{{- define "servanda.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: contract, mountPath: /etc/servanda, readOnly: true}
  - {name: keys, mountPath: /etc/servanda-keys, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- if .Values.models }}
  - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* leader and gateways read the same contract when they start */}}
{{- define "servanda.annotations" -}}
servanda.dev/contract: {{ printf "%s\n%s" .Values.contract .Values.prompts | sha256sum | trunc 16 | quote }}
{{- end -}}
